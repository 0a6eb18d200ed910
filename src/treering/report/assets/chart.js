"use strict";
// Small charts in SVG: lines, stacked bars, tables. A figure is {id, title, help, x, series: [{name, points}], ...}.

const content = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const STYLES = [
  { color: "var(--c0)", dash: "", mark: "circle" },
  { color: "var(--c1)", dash: "6 4", mark: "square" },
  { color: "var(--c2)", dash: "2 3", mark: "diamond" },
  { color: "var(--c3)", dash: "8 3 2 3", mark: "circle" },
  { color: "var(--c4)", dash: "12 3", mark: "square" },
];
// With more lines than styles, repeat the colours with other dashes.
const styleOf = (i) => (i < STYLES.length ? STYLES[i] : { ...STYLES[i % STYLES.length], dash: `${2 + (i % 4)} ${3 + (i % 5)}` });

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// JSON has no NaN and no infinity, so they are strings there; charts drop them.
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function format(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  if (value === 0 || Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function ticks(low, high, most) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => span / size <= most);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

function showTip(event, words) {
  tip.textContent = words;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, event.clientY - height - 10))}px`;
}

function hideTip() {
  tip.hidden = true;
}

function mark(kind, x, y, size, color) {
  if (kind === "circle") return svg("circle", { cx: x, cy: y, r: size, fill: color });
  const side = size * 1.8;
  const turn = kind === "diamond" ? `rotate(45 ${x} ${y})` : "";
  return svg("rect", { x: x - side / 2, y: y - side / 2, width: side, height: side, fill: color, transform: turn });
}

function legend(figure) {
  const keys = figure.series.map((series, i) => {
    const style = series.style ?? styleOf(i);
    const line = svg("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: style.color, "stroke-width": 2, "stroke-dasharray": style.dash });
    const block = svg("rect", { x: 5, y: 0, width: 12, height: 12, rx: 2, fill: style.color });
    const parts = figure.kind === "stack" ? [block] : [line, mark(style.mark, 12, 6, 3, style.color)];
    return html("span", {}, svg("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, ...parts), series.label ?? series.name);
  });
  return html("div", { class: "legend" }, ...keys);
}

// Draws the frame of a plot: grid, axes and the two scales.
function frame(figure, width, height, xs, low, high) {
  const labels = ticks(low, high, 5);
  const left = 12 + 7 * Math.max(...labels.map((value) => format(value).length));
  const [right, top, bottom] = [10, 8, 32];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const pad = figure.kind === "stack" ? 0.5 : first === last ? 0.5 : 0;
  const x = (value) => left + ((value - first + pad) / (last - first + 2 * pad)) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low || 1)) * (height - bottom - top);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": figure.title });
  for (const value of labels) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawing.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const value of ticks(first, last, Math.max(2, Math.floor(width / 70)))) {
    if (!Number.isInteger(value)) continue;
    drawing.append(svg("text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, format(value)));
  }
  drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  drawing.append(svg("text", { x: width - right, y: height - 2, "text-anchor": "end" }, figure.x));
  return { drawing, x, y, left, right: width - right, top, floor: height - bottom };
}

// Marks the steps after which a run was resumed.
function resumes(plot) {
  for (const run of content.runs)
    for (const step of run.facts.resumed) {
      const x = plot.x(step + 0.5);
      if (x < plot.left || x > plot.right) continue;
      const title = svg("title", {}, `${run.name} was resumed after step ${step}`);
      plot.drawing.append(svg("line", { class: "resumed", x1: x, x2: x, y1: plot.top, y2: plot.floor }, title));
      plot.drawing.append(svg("text", { x, y: plot.floor - 3, "text-anchor": "middle" }, "↻"));
    }
}

function drawLines(figure, width) {
  const points = figure.series.flatMap((series) => series.points);
  const values = points.map(([, y]) => y);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (figure.from !== undefined) low = Math.min(low, figure.from);
  if (figure.to !== undefined) high = Math.max(high, figure.to);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  const plot = frame(figure, width, 210, points.map(([x]) => x), low === figure.from ? low : low - room, high === figure.to ? high : high + room);
  // Draw the solid line first and wide, so that lines on top of it stay visible.
  const styles = figure.series.map((series, i) => series.style ?? styleOf(i));
  if (figure.x === "step") resumes(plot);
  const order = figure.series.map((_, i) => i).sort((a, b) => styles[a].dash.length - styles[b].dash.length);
  order.forEach((i) => {
    const [series, style] = [figure.series[i], styles[i]];
    const path = series.points.map(([x, y], n) => `${n ? "L" : "M"}${plot.x(x).toFixed(1)} ${plot.y(y).toFixed(1)}`).join("");
    plot.drawing.append(svg("path", { class: "series", d: path, stroke: style.color, "stroke-dasharray": style.dash, "stroke-width": style.dash ? 1.8 : 3 }));
    if (series.points.length <= 40)
      for (const [x, y] of series.points) plot.drawing.append(mark(style.mark, plot.x(x), plot.y(y), style.dash ? 2.2 : 3.4, style.color));
  });
  return plot;
}

function drawStack(figure, width) {
  const totals = new Map();
  for (const series of figure.series) for (const [x, y] of series.points) totals.set(x, (totals.get(x) ?? 0) + y);
  const plot = frame(figure, width, 210, [...totals.keys()], 0, Math.max(...totals.values()) * 1.04 || 1);
  const gap = (plot.right - plot.left) / totals.size;
  const below = new Map();
  figure.series.forEach((series, i) => {
    const style = series.style ?? styleOf(i);
    for (const [x, y] of series.points) {
      const from = below.get(x) ?? 0;
      below.set(x, from + y);
      const bar = { x: plot.x(x) - gap * 0.42, width: Math.max(0.5, gap * 0.84), y: plot.y(from + y), height: plot.y(from) - plot.y(from + y), fill: style.color };
      plot.drawing.append(svg("rect", bar));
    }
  });
  return plot;
}

function follow(figure, plot) {
  const xs = [...new Set(figure.series.flatMap((series) => series.points.map(([x]) => x)))].sort((a, b) => a - b);
  const lookup = figure.series.map((series) => new Map(series.points));
  const cursor = svg("line", { class: "cursor", y1: plot.top, y2: plot.floor, visibility: "hidden" });
  plot.drawing.append(cursor, svg("rect", { x: plot.left, y: 0, width: plot.right - plot.left, height: plot.floor, fill: "transparent" }));
  plot.drawing.addEventListener("pointermove", (event) => {
    const box = plot.drawing.getBoundingClientRect();
    const pointer = ((event.clientX - box.left) / box.width) * plot.drawing.viewBox.baseVal.width;
    const near = xs.reduce((best, x) => (Math.abs(plot.x(x) - pointer) < Math.abs(plot.x(best) - pointer) ? x : best), xs[0]);
    cursor.setAttribute("x1", plot.x(near));
    cursor.setAttribute("x2", plot.x(near));
    cursor.setAttribute("visibility", "visible");
    const lines = figure.series.map((series, i) => `${series.name}: ${format(lookup[i].get(near))}`);
    showTip(event, `${figure.x} ${near}\n${lines.join("\n")}`);
  });
  plot.drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  });
}

function table(figure) {
  const xs = [...new Set(figure.series.flatMap((series) => series.points.map(([x]) => x)))].sort((a, b) => a - b);
  const lookup = figure.series.map((series) => new Map(series.points));
  const head = html("tr", {}, ...[figure.x, ...figure.series.map((series) => series.name)].map((name) => html("th", { scope: "col" }, name)));
  const rows = xs.map((x) => html("tr", {}, html("td", {}, format(x)), ...lookup.map((values) => html("td", { "data-value": values.get(x) ?? "" }, format(values.get(x))))));
  return html("div", { class: "scroll" }, html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows)));
}

function withTable(figure) {
  const details = html("details", {}, html("summary", {}, "Numbers"));
  // A run may have thousands of steps, so make the table when it is opened.
  details.addEventListener("toggle", () => details.children.length === 1 && details.append(table(figure)));
  return details;
}

// Draws again at each new width; `draw` gets the width in pixels and returns an element.
function fitted(box, draw) {
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(box.clientWidth);
    if (!width || width === drawn) return;
    drawn = width;
    box.replaceChildren(draw(width));
  };
  // Draw later, because drawing changes sizes, which an observer must not do.
  new ResizeObserver(() => setTimeout(redraw)).observe(box);
}

function card(figure) {
  const finite = figure.series.map((series) => ({ ...series, points: series.points.filter(([x, y]) => isNumber(x) && isNumber(y)) }));
  const shown = { ...figure, series: finite.filter((series) => series.points.length) };
  const plot = html("div", { class: "plot" });
  const element = html("section", { class: "card", id: figure.id }, html("h3", {}, figure.title), html("p", { class: "help" }, figure.help));
  if (!shown.series.length) return element.append(html("p", {}, "Nothing yet.")), element;
  if (shown.series.length > 1 || figure.kind === "stack") element.append(legend(shown));
  fitted(plot, (width) => {
    const drawn = figure.kind === "stack" ? drawStack(shown, width) : drawLines(shown, width);
    follow(shown, drawn);
    return drawn.drawing;
  });
  element.append(plot, withTable(figure));
  return element;
}
