// The forest of one prompt and the origins of one rollout's tokens, with selectors for both.

const one = isRl ? "rollout" : "trajectory";
const ORIGINS = {
  g: ["given", isRl ? "the prompt, or an answer of the environment" : "masked: not a token of the loss"],
  n: isRl ? ["sampled", "the model sampled it itself, one per forward pass"] : ["trained", "a token of the loss"],
  h: ["history", "drafted from earlier rollouts of the prompt"],
  s: ["siblings", "drafted from the running rollouts of the group"],
  o: ["own context", "drafted from earlier in the same rollout"],
  x: ["others", "drafted from rollouts of other prompts"],
};
const MARKS = {
  k: ["kept", "rehearsed before its step, and drawn the same by the weights of the step", "kept"],
  c: ["first change", "the first rehearsed token that the weights of the step drew differently", "changed"],
};
const hasRehearsals = content.prompts.some((prompt) => prompt.rollouts.some((rollout) => rollout.rehearsed));
const hasTexts = Object.keys(content.texts).length > 0;
const textOf = (token) => content.texts[token] ?? String(token);
const oneLine = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const selected = { prompt: 0, rollout: 0 };
const listeners = [];

function choose(prompt, rollout) {
  Object.assign(selected, { prompt, rollout });
  for (const listener of listeners) listener();
}

function shade(advantage, most) {
  if (advantage === null || !most) return { fill: "var(--idle)" };
  const size = Math.abs(advantage) / most;
  if (size < 0.02) return { fill: "var(--idle)" };
  return { fill: advantage > 0 ? "var(--plus)" : "var(--minus)", "fill-opacity": (0.2 + 0.42 * size).toFixed(2) };
}

function segmentText(prompt, [start, length, top]) {
  const tokens = prompt.rollouts[prompt.forest.rows[top]].tokens.slice(start, start + length);
  return oneLine(tokens.map(textOf).join(hasTexts ? "" : " "));
}

function drawForest(prompt, width) {
  const { forest } = prompt;
  const rows = forest.rows.length;
  const high = Math.max(5, Math.min(22, Math.floor(620 / rows)));
  const right = isRl ? 118 : 4;
  const depth = Math.max(...forest.segments.map(([start, length]) => start + length));
  const scale = (width - right) / depth;
  const most = Math.max(...forest.advantages.map((value) => Math.abs(value ?? 0)));
  const height = rows * high + 24;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Forest of ${prompt.id}` });
  if (isRl) drawing.append(svg("text", { x: width - right + 10, y: 12 }, "reward"), svg("text", { x: width, y: 12, "text-anchor": "end" }, "advantage"));
  for (const segment of forest.segments) {
    const [start, length, top, bottom, advantage] = segment;
    const box = { x: start * scale + 0.5, y: 18 + top * high + 0.5, width: Math.max(1, length * scale - 1), height: (bottom - top) * high - 1, rx: 2, ...shade(advantage, most) };
    const bar = svg("rect", box);
    const words = segmentText(prompt, segment);
    bar.addEventListener("pointermove", (event) => showTip(event, `${length} token${length > 1 ? "s" : ""}, shared by ${bottom - top} rollout${bottom - top > 1 ? "s" : ""}\nmean advantage ${format(advantage)}\n${words.slice(0, 300)}`));
    bar.addEventListener("pointerleave", hideTip);
    bar.addEventListener("click", () => choose(selected.prompt, forest.rows[top]));
    drawing.append(bar);
    const room = Math.floor((box.width - 6) / 6.7);
    if (box.height >= 13 && room >= Math.min(3, words.length))
      drawing.append(svg("text", { class: "code", x: box.x + 4, y: box.y + box.height / 2 + 4 }, words.length > room ? `${words.slice(0, Math.max(1, room - 1))}…` : words));
  }
  forest.rows.forEach((rollout, row) => {
    const y = 18 + row * high;
    const target = svg("rect", { class: "row", x: width - right, y, width: right, height: high, fill: "transparent" });
    target.addEventListener("click", () => choose(selected.prompt, rollout));
    if (isRl && high >= 9) {
      drawing.append(svg("text", { class: "ink", x: width - right + 10, y: y + high / 2 + 4 }, format(forest.rewards[rollout])));
      drawing.append(svg("text", { x: width, y: y + high / 2 + 4, "text-anchor": "end" }, signed(forest.advantages[rollout])));
    } else if (isRl) {
      drawing.append(svg("rect", { x: width - right + 10, y: y + 1, width: 30, height: high - 2, ...shade(forest.advantages[rollout], most) }));
    }
    if (rollout === selected.rollout) drawing.append(svg("rect", { class: "selected", x: 1, y: y + 0.5, width: width - 2, height: high - 1, rx: 3 }));
    drawing.append(target);
  });
  return drawing;
}

const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : ""}${value.toFixed(2)}`);

function forestCard() {
  const element = html("section", { class: "card wide", id: "forest" }, html("h3", {}, isRl ? "One forest: the rollouts of a prompt" : "One tree: the trajectories of a task"));
  const most = content.prompts.length ? "" : " Nothing yet.";
  const colors = isRl ? " Blue: above the group's mean reward. Orange: below. Grey: 0 on average." : "";
  element.append(html("p", { class: "help" }, `From left to right, tokens; each row is a ${one}, and a bar over several rows is computed once for all of them.${colors}${most}`));
  if (!content.prompts.length) return element;
  const options = content.prompts.map((prompt, i) => html("option", { value: i }, oneLine(prompt.id)));
  const select = html("select", { id: "prompt-select" }, ...options);
  const line = html("span", { class: "status", id: "forest-line" });
  const plot = html("div", { class: "plot" });
  const show = () => {
    const { forest } = content.prompts[selected.prompt];
    select.value = selected.prompt;
    line.textContent = `${format(forest.rows.length)} ${isRl ? "rollouts" : "trajectories"}: ${format(forest.num_branch_tokens)} tokens, ${format(forest.num_tokens)} of them distinct. ${isRl ? `${content.prompts.length} of the epoch's ${content.num_prompts} prompts are here.` : `${content.prompts.length} tasks are here.`}`;
    if (plot.clientWidth) plot.replaceChildren(drawForest(content.prompts[selected.prompt], Math.floor(plot.clientWidth)));
  };
  select.addEventListener("change", () => choose(Number(select.value), 0));
  fitted(plot, (width) => drawForest(content.prompts[selected.prompt], width));
  listeners.push(show);
  element.append(html("div", { class: "controls" }, html("label", {}, isRl ? "Prompt" : "Task", select), line), plot);
  show();
  return element;
}

function tokenSpan(rollout, at) {
  const letter = rollout.origins[at];
  const token = rollout.tokens[at];
  const text = textOf(token);
  const mark = MARKS[rollout.rehearsed?.[at]];
  const classes = [letter, ...(hasTexts ? [] : ["ids"]), ...(mark ? [mark[2]] : [])].join(" ");
  const span = html("i", { class: classes }, text === "\n" ? "⏎\n" : text);
  span.addEventListener("pointermove", (event) => {
    const logprob = rollout.logprobs?.[at];
    const chance = isNumber(logprob) && letter !== "g" ? `\nprobability ${format(Math.exp(logprob))}` : "";
    const rehearsed = mark ? `\n${mark[0]}: ${mark[1]}` : "";
    showTip(event, `${ORIGINS[letter][0]}: ${ORIGINS[letter][1]}${rehearsed}\ntoken ${token}, position ${at}${chance}`);
  });
  span.addEventListener("pointerleave", hideTip);
  return span;
}

const promptEnd = (rollout) => rollout.origins.length - rollout.origins.replace(/^g+/, "").length;
const joined = (tokens) => oneLine(tokens.map(textOf).join(hasTexts ? "" : " "));

// All rollouts of the page as a table; a click shows one below the forest.
const ORDERS = {
  "worst first": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "best first": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "longest first": (a, b) => b.size - a.size,
};
const MOST_ROWS = 200;

function rolloutTable() {
  if (!content.prompts.length) return null;
  const rows = content.prompts.flatMap((prompt, p) => prompt.rollouts.map((rollout, r) => {
    const start = promptEnd(rollout);
    const [asked, answer] = [joined(rollout.tokens.slice(0, start)), joined(rollout.tokens.slice(start))];
    return { p, r, asked, answer, id: prompt.id, reward: prompt.forest.rewards[r], advantage: prompt.forest.advantages[r], size: rollout.tokens.length - start, text: `${prompt.id} ${asked} ${answer}`.toLowerCase() };
  }));
  const element = html("section", { class: "card wide", id: "table" }, html("h3", {}, `All ${format(rows.length)} ${isRl ? "rollouts" : "trajectories"} of this page`));
  element.append(html("p", { class: "help" }, "Click a row to show it as text above."));
  const orders = Object.keys(ORDERS).slice(isRl ? 0 : 2);
  const order = html("select", { id: "order-select" }, ...orders.map((name) => html("option", {}, name)));
  const search = html("input", { id: "search", type: "search", placeholder: "Search in texts and prompts" });
  const [count, body] = [html("span", { class: "status" }), html("tbody", {})];
  const show = () => {
    const found = rows.filter((row) => row.text.includes(search.value.toLowerCase())).sort(ORDERS[order.value]);
    count.textContent = found.length > MOST_ROWS ? `the first ${MOST_ROWS} of ${format(found.length)}` : `${format(found.length)}`;
    body.replaceChildren(...found.slice(0, MOST_ROWS).map((row) => {
      const figures = isRl ? [format(row.reward), signed(row.advantage)] : [];
      const cells = [...figures, format(row.size)].map((value) => html("td", {}, value));
      const line = html("tr", { class: "row", tabindex: "0" }, ...cells, html("td", { class: "excerpt" }, html("small", {}, row.asked.slice(-80)), " ", row.answer.slice(0, 240)));
      const pick = () => (choose(row.p, row.r), document.getElementById("origins").scrollIntoView({ behavior: "smooth" }));
      line.addEventListener("click", pick);
      line.addEventListener("keydown", (event) => event.key === "Enter" && pick());
      return line;
    }));
  };
  order.addEventListener("change", show);
  search.addEventListener("input", show);
  const names = [...(isRl ? ["reward", "adv."] : []), "tokens", "end of the prompt, and what followed"];
  const head = html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name))));
  element.append(html("div", { class: "controls" }, html("label", {}, "Order", order), search, count), html("div", { class: "scroll tall" }, html("table", { class: "rollouts" }, head, body)));
  show();
  return element;
}

function originCard() {
  const element = html("section", { class: "card wide", id: "origins" }, html("h3", {}, isRl ? "One rollout: where its tokens came from" : "One trajectory: its trained tokens"));
  const how = content.replayed
    ? "The run does not record this: the page replayed its drafter over the stored rollouts of the prompts drawn here, which may differ slightly from the run's own drafts."
    : "This run has no drafts, so the model sampled each token itself.";
  element.append(html("p", { class: "help" }, isRl ? `Coloured tokens were drafted and accepted, so they cost no extra forward pass. ${how}` : "Grey tokens are read, framed ones are trained."));
  if (!content.prompts.length) return element;
  if (hasRehearsals) element.append(html("p", { class: "help" }, "A line above a token: it was rehearsed, that is sampled before its step, and kept. A frame: the first rehearsed token that changed. Kept tokens are drawn again many in a pass, without drafts."));
  const select = html("select", { id: "rollout-select" });
  const keys = html("div", { class: "legend", id: "origin-counts" });
  const marks = html("div", { class: "legend", id: "rehearsal-counts" });
  const text = html("div", { class: "text", id: "rollout-text", tabindex: "0" });
  const given = html("div", { class: "text", id: "prompt-text" });
  const folded = html("details", {}, html("summary", {}, ""), given);
  const show = () => {
    const prompt = content.prompts[selected.prompt];
    const rollout = prompt.rollouts[selected.rollout];
    const names = prompt.rollouts.map((each, i) => (!isRl ? `${i + 1}: ${format(each.tokens.length)} tokens` : `${i + 1}: reward ${format(prompt.forest.rewards[i])}, advantage ${signed(prompt.forest.advantages[i])}`));
    select.replaceChildren(...names.map((name, i) => html("option", { value: i }, name)));
    select.value = selected.rollout;
    const counts = Object.fromEntries(Object.keys(ORIGINS).map((letter) => [letter, 0]));
    for (const letter of rollout.origins) counts[letter]++;
    const all = rollout.origins.length - counts.g;
    const shown = Object.entries(counts).filter(([letter, count]) => count || (isRl && letter !== "g"));
    keys.replaceChildren(...shown.map(([letter, count]) => html("span", { "data-origin": letter, "data-value": count }, html("span", { class: `key ${letter}` }, ORIGINS[letter][0]), letter === "g" ? format(count) : `${format(count)} (${all ? Math.round((100 * count) / all) : 0} %)`)));
    const marked = (letter) => [...(rollout.rehearsed ?? "")].filter((each) => each === letter).length;
    if (hasRehearsals) marks.replaceChildren(...Object.entries(MARKS).map(([letter, [name, , style]]) => html("span", { "data-mark": letter, "data-value": marked(letter) }, html("span", { class: `key ${style}` }, name), format(marked(letter)))));
    // All rollouts begin with the prompt, so fold it.
    const start = promptEnd(rollout);
    const spans = rollout.tokens.map((_, at) => tokenSpan(rollout, at));
    folded.firstChild.textContent = `Prompt: ${format(start)} tokens`;
    folded.hidden = start === 0;
    given.replaceChildren(...spans.slice(0, start));
    text.replaceChildren(...spans.slice(start));
  };
  select.addEventListener("change", () => choose(selected.prompt, Number(select.value)));
  listeners.push(show);
  element.append(html("div", { class: "controls" }, html("label", {}, isRl ? "Rollout" : "Trajectory", select)), keys, ...(hasRehearsals ? [marks] : []), folded, text);
  show();
  return element;
}
