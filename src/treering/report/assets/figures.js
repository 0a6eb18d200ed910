// Figures of a run: titles, reading help and series.

const runs = content.runs;
const ours = runs[runs.length - 1];
const isRl = content.kind === "rl";
const isCompared = content.compared;

// Index of a run's style; in a demo our run has the first.
const styled = (run) => ({ style: styleOf(isCompared ? runs.indexOf(run) : runs.length - 1 - runs.indexOf(run)) });
// Text for a metric: "train/clip_low" is "clip low", "eval/pass_at_4" is "pass@4".
const wordsOf = (name) => name.replace(/^(train|eval|time)\//, "").replace(/pass_at_(\d+)/, "pass@$1").replaceAll(/[/_]/g, " ");
// A line for one of several metrics: the run's colour, and the dashes of the metric.
const lineOf = (each, i, words) => (runs.length > 1 ? { ...each, name: `${each.name}, ${words}`, style: { ...each.style, dash: styleOf(i).dash, mark: styleOf(i).mark } } : { ...each, name: words, style: styleOf(i) });
const bySteps = (name) => runs.map((run) => ({ name: runs.length > 1 ? run.name : wordsOf(name), ...styled(run), points: run.rows.filter((row) => name in row).map((row) => [row.step, row[name]]) }));
const byEpochs = (name, label) => runs.map((run) => ({ name: runs.length > 1 ? run.name : label, ...styled(run), points: run.epochs.filter((row) => row[name] !== null).map((row) => [row.epoch, row[name]]) }));

const passNames = [...new Set(runs.flatMap((run) => run.names))].filter((name) => name.startsWith("eval/pass_at_")).sort((a, b) => a.length - b.length || (a < b ? -1 : 1));

// Figures that only some runs have; with a single run, several names are lines of one chart.
function optional() {
  const figures = [
    { id: "eval-loss", title: "Held-out loss", help: "Mean negative log-probability of the trained tokens of held-out tasks; it rises when training overfits.", names: ["eval/loss"] },
    { id: "eval-reward", title: "Held-out reward", help: "Mean reward of held-out prompts, the same ones each time.", names: ["eval/reward"] },
    ...(passNames.length ? [{ id: "eval-pass", title: "Held-out pass@k", help: "Chance that one of k samples of a held-out prompt passes.", names: passNames, from: 0, to: 1 }] : []),
    { id: "entropy", title: "Entropy", help: "Entropy of the sampled distributions, in nats; near 0 the policy no longer explores.", names: ["train/entropy"] },
    { id: "kl", title: "KL to the start", help: "Estimated at the sampled tokens, in nats per token; it grows as the policy leaves its start.", names: ["train/kl"] },
    { id: "approx-kl", title: "KL to the sampler", help: "KL between the policy that sampled a step and the policy that the step trained.", names: ["train/approx_kl"] },
    { id: "clipped", title: "Clipped tokens", help: "Share of trained tokens whose gradient is clipped.", names: ["train/clip_low", "train/clip_high"], from: 0 },
    { id: "reward-spread", title: "Spread of rewards", help: "Standard deviation over a step's rollouts; at 0 there is nothing to learn.", names: ["reward/std"], from: 0 },
  ];
  return figures
    .map((figure) => ({ x: "step", ...figure, series: isCompared ? bySteps(figure.names.at(-1)) : figure.names.flatMap((name, i) => bySteps(name).map((each) => (figure.names.length > 1 ? lineOf(each, i, wordsOf(name)) : each))) }))
    .filter((figure) => figure.series.some((each) => each.points.length));
}

function learning() {
  if (!isRl)
    return [
      { id: "loss", title: "Loss", help: "Mean loss of each step's trained tokens; lower is better.", x: "step", series: bySteps("train/loss") },
      { id: "speed", title: "Speed of training", help: "Trained tokens of all branches per second; shared ones count once per branch.", x: "step", series: bySteps("time/tokens_per_s"), from: 0 },
      { id: "grad-norm", title: "Gradient norm", help: "Norm before clipping; a spike means unusual data or too high a learning rate.", x: "step", series: bySteps("train/grad_norm"), from: 0 },
    ];
  return [
    { id: "reward", title: "Reward", help: "Mean reward of each step's rollouts; prompts differ from step to step, so look at the trend.", x: "step", series: bySteps("reward/mean") },
    { id: "length", title: "Length of rollouts", help: "Mean tokens of a rollout; growth means longer answers and longer steps.", x: "step", series: bySteps("rollout/length_mean"), from: 0 },
    { id: "zero-variance", title: "Groups that teach nothing", help: "Share of groups whose rollouts have equal rewards; these are not trained.", x: "step", series: bySteps("reward/zero_variance_share"), from: 0, to: 1 },
  ];
}

function drafting() {
  if (!isRl) return [];
  return [
    { id: "tokens-per-forward", title: "Tokens per forward pass", help: "Tokens that a rollout gains per forward pass: 1 without drafts, more when drafts are accepted.", x: "epoch", series: byEpochs("tokens_per_forward", "tokens per forward"), from: 1 },
    { id: "acceptance", title: "Accepted drafts", help: "Share of drafted tokens that the model would have sampled itself; it rises as history fills.", x: "epoch", series: byEpochs("acceptance", "acceptance"), from: 0, to: 1 },
    { id: "sampling-speed", title: "Speed of sampling", help: "Sampled tokens per second while rollouts run.", x: "step", series: bySteps("time/sampled_per_s"), from: 0 },
  ];
}

function sharing() {
  const computed = (run) => run.rows.filter((row) => "train/num_tokens" in row).map((row) => [row.step, 1 - row["train/num_tokens"] / row["train/num_branch_tokens"]]);
  const series = isCompared ? runs.map((run) => ({ name: run.name, ...styled(run), points: computed(run) })) : [{ name: "sharing", points: computed(ours) }];
  const points = (name) => content.bounds.map((row) => [row.epoch, row[name]]);
  const tokens = ours.epochs.filter((row) => row.token_bound !== null).map((row) => [row.epoch, row.token_bound]);
  return [
    { id: "sharing", title: "Sharing", help: "Share of trained tokens that another branch of the tree has already computed; at 0 trees cannot help.", x: "step", series, from: 0, to: 1 },
    { id: "bounds", title: "Best possible speedup of training", help: `Ratio of the work of flat sequences to that of trees: in tokens, as trained${isRl ? "; and in FLOPs with attention, from the rollouts that the page has read" : ""}.`, x: "epoch", series: [{ name: "by tokens", points: tokens }, { name: "by FLOPs", points: points("flop_bound") }], from: 1 },
  ].slice(0, isCompared ? 1 : 2);
}

const PHASES = [
  ["rollout", "var(--c0)"],
  ["training", "var(--c1)"],
  ["update", "var(--c2)"],
  ["other", "var(--c4)"],
];

const secondsOf = (rows, phase) => rows.reduce((total, row) => total + (row[phase] ?? 0), 0);

function phases() {
  return [...runs].reverse().map((run) => {
    const all = PHASES.reduce((total, [phase]) => total + secondsOf(run.phases, phase), 0);
    const series = PHASES.map(([phase, color]) => {
      const share = all ? Math.round((100 * secondsOf(run.phases, phase)) / all) : 0;
      return { name: phase, label: `${phase} ${share} %`, style: { color }, points: run.phases.filter((row) => phase in row).map((row) => [row.step, row[phase]]) };
    });
    const name = runs.length > 1 ? `: ${run.name}` : "";
    const overlap = run.has_workers ? " Phases of several processes overlap, so a bar may be longer than its step." : "";
    return { id: `phases-${run.name}`, title: `Seconds of each step${name}`, help: `Time of each phase of a step; the legend has the shares of the whole run.${overlap}`, x: "step", kind: "stack", series: series.filter((each) => each.points.some(([, y]) => y > 0)) };
  });
}

function workers() {
  if (!runs.some((run) => run.has_workers)) return [];
  return [
    { id: "bubble", title: "Idle time of the workers", help: "Bubble: share of the workers' time without a rollout to decode; 0 is best.", x: "step", series: bySteps("rollout/bubble"), from: 0, to: 1 },
    { id: "staleness", title: "Staleness", help: "Steps between the weights that sampled a step and the weights it trained; 0 is on-policy.", x: "step", series: bySteps("rollout/staleness"), from: 0 },
    { id: "trainer-wait", title: "Idle time of the trainer", help: "Seconds that the trainer waited for the rollouts of each step.", x: "step", series: bySteps("time/trainer_wait_s"), from: 0 },
  ];
}

const NUM_SHOWN = 12;

// Times when each process worked on the newest steps: a row per worker, the trainer last.
function timeline() {
  const newest = [...new Set(ours.timeline.map((span) => span.step))].sort((a, b) => a - b).slice(-NUM_SHOWN);
  const spans = ours.timeline.filter((span) => newest.includes(span.step));
  if (!spans.length) return null;
  const names = [...new Set(spans.map((span) => span.worker))].sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  const [first, last] = [Math.min(...spans.map((span) => span.started_s)), Math.max(...spans.map((span) => span.ended_s))];
  const element = html("section", { class: "card wide", id: "timeline" }, html("h3", {}, `Workers and trainer in steps ${newest[0]} to ${newest.at(-1)}`));
  element.append(html("p", { class: "help" }, "Each row is a process and each bar its share of a step; neighbouring steps differ in colour. Gaps are bubbles: the process had nothing to do."));
  const plot = html("div", { class: "plot" });
  fitted(plot, (width) => {
    const [left, high] = [66, names.length > 16 ? 12 : 22];
    const x = (seconds) => left + ((seconds - first) / (last - first || 1)) * (width - left - 4);
    const floor = names.length * high;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${floor + 30}`, height: floor + 30, role: "img", "aria-label": "Timeline of the workers" });
    names.forEach((name, row) => {
      drawing.append(svg("rect", { x: left, y: row * high + 1, width: width - left - 4, height: high - 2, fill: "var(--idle)" }));
      drawing.append(svg("text", { x: 0, y: row * high + high / 2 + 4 }, name === null ? "trainer" : `worker ${name}`));
    });
    for (const span of spans) {
      const row = names.indexOf(span.worker);
      const style = STYLES[newest.indexOf(span.step) % 3];
      const bar = svg("rect", { x: x(span.started_s), y: row * high + 1, width: Math.max(1, x(span.ended_s) - x(span.started_s)), height: high - 2, fill: style.color });
      const busy = span.ended_s > span.started_s ? Math.min(1, span.busy_s / (span.ended_s - span.started_s)) : 1;
      const words = span.worker === null ? "" : `\n${format(span.num_rollouts)} turns ended`;
      bar.addEventListener("pointermove", (event) => showTip(event, `step ${span.step}: ${format(span.started_s - first)} to ${format(span.ended_s - first)} s\nbusy ${Math.round(100 * busy)} %${words}`));
      bar.addEventListener("pointerleave", hideTip);
      drawing.append(bar);
    }
    for (const second of ticks(0, last - first, Math.max(2, Math.floor(width / 90))))
      drawing.append(svg("text", { x: x(first + second), y: floor + 16, "text-anchor": "middle" }, `${format(second)} s`));
    return drawing;
  });
  return element.append(plot), element;
}

// The final figures of several runs, and the settings in which they differ.
function finals() {
  const last = (run, name) => run.rows.findLast((row) => isNumber(row[name]))?.[name] ?? null;
  const epoch = (run, name) => run.epochs.at(-1)?.[name] ?? null;
  const rows = [
    ["steps", (run) => last(run, "step")],
    ["reward of the newest epoch", (run) => epoch(run, "reward")],
    ["loss", (run) => last(run, "train/loss")],
    ["tokens per forward", (run) => epoch(run, "tokens_per_forward")],
    ["accepted drafts", (run) => epoch(run, "acceptance")],
    ["sharing", (run) => epoch(run, "sharing")],
    ["entropy", (run) => last(run, "train/entropy")],
    ["KL to the start", (run) => last(run, "train/kl")],
    ["seconds of all steps", (run) => PHASES.reduce((total, [phase]) => total + secondsOf(run.phases, phase), 0)],
  ].map(([name, value]) => [name, ...runs.map(value)]);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.facts.settings)))].sort();
  const settings = names.map((name) => [name, ...runs.map((run) => run.facts.settings[name] ?? null)]).filter(([, ...values]) => new Set(values).size > 1);
  const part = (id, title, help, body) => html("section", { class: "card wide", id }, html("h3", {}, title), html("p", { class: "help" }, help), html("div", { class: "scroll" }, facts(["", ...runs.map((run) => run.name)], body)));
  return [
    part("finals", "Final figures", "The newest value of each run.", rows.filter((row) => row.slice(1).some(isNumber))),
    part("differences", "Settings that differ", "All others are equal.", settings),
  ];
}

// Settings, model and machine of each run.
function aboutCards() {
  return runs.map((run) => {
    const element = html("section", { class: "card wide about" }, html("h3", {}, runs.length > 1 ? `About ${run.name}` : "About the run"), facts([], Object.entries(run.facts.table)));
    const settings = Object.entries(run.facts.settings);
    if (settings.length) element.append(html("details", {}, html("summary", {}, `${settings.length} settings`), html("div", { class: "scroll" }, facts([], settings))));
    return element;
  });
}

// Bars of all seconds, one per run, over the steps that both runs have.
function comparison() {
  if (runs.length < 2 || isCompared) return null;
  const steps = Math.min(...runs.map((run) => run.phases.length));
  const totals = runs.map((run) => PHASES.map(([phase]) => secondsOf(run.phases.slice(0, steps), phase)));
  const sums = totals.map((parts) => parts.reduce((a, b) => a + b, 0));
  if (!steps || !sums.every((sum) => sum > 0)) return null;
  const element = html("section", { class: "card wide", id: "comparison" }, html("h3", {}, `Plain against Treering: ${format(sums[0] / sums[1])}x as fast`));
  element.append(html("p", { class: "help" }, `All seconds of the first ${steps} steps, same start and seeds. The shorter bar is the faster loop; each colour is a phase.`));
  element.append(legend({ kind: "stack", series: PHASES.map(([name, color]) => ({ name, style: { color } })) }));
  const plot = html("div", { class: "plot" });
  fitted(plot, (width) => {
    const [left, right] = [68, 64];
    const drawing = svg("svg", { viewBox: `0 0 ${width} 92`, height: 92, role: "img", "aria-label": "Plain against Treering" });
    runs.forEach((run, i) => {
      const top = 6 + 44 * i;
      let x = left;
      drawing.append(svg("text", { class: "label", x: 0, y: top + 22 }, run.name));
      totals[i].forEach((seconds, p) => {
        const size = (seconds / Math.max(...sums)) * (width - left - right);
        const bar = svg("rect", { x, y: top, width: size, height: 34, fill: PHASES[p][1] });
        bar.addEventListener("pointermove", (event) => showTip(event, `${run.name}, ${PHASES[p][0]}: ${format(seconds)} s`));
        bar.addEventListener("pointerleave", hideTip);
        drawing.append(bar);
        x += size;
      });
      drawing.append(svg("text", { class: "ink", x: x + 6, y: top + 22 }, `${format(sums[i])} s`));
    });
    return drawing;
  });
  const rows = PHASES.map(([phase], p) => [`${phase}, seconds`, ...totals.map((parts) => parts[p]), totals[0][p] / totals[1][p]]);
  rows.push(["all, seconds", ...sums, sums[0] / sums[1]]);
  const known = rows.filter((row) => isNumber(row[3]));
  element.append(plot, facts(["", ...runs.map((run) => run.name), "plain / treering"], known));
  if (content.demo.num_steps) {
    const different = content.demo.first_difference;
    const words = different === null ? "Both runs sampled the same tokens in every step." : `Both runs sampled the same tokens up to step ${different - 1}.`;
    element.append(html("p", { class: "help" }, `${words} ${content.demo.machine}; torch ${content.demo.versions?.torch}.`));
  }
  return element;
}

function facts(head, rows) {
  const cells = (row) => row.map((value, i) => html("td", i && isNumber(value) ? { "data-value": value } : {}, format(value)));
  const body = html("tbody", {}, ...rows.map((row) => html("tr", {}, ...cells(row))));
  const names = html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name))));
  return html("table", { class: "plain" }, ...(head.length ? [names] : []), body);
}

// Outcomes of the rollouts, as one bar and a table.
function account() {
  const parts = Object.entries(ours.account);
  const all = parts.reduce((total, [, count]) => total + count, 0);
  const element = html("section", { class: "card wide", id: "account" }, html("h3", {}, `Account of ${format(all)} rollouts`));
  element.append(html("p", { class: "help" }, "Each sampled rollout is counted once: as trained, or by the reason why it is not."));
  const colors = ["var(--c0)", "var(--c4)", "var(--c1)", "var(--c2)", "var(--c3)"];
  const plot = html("div", { class: "plot" });
  fitted(plot, (width) => {
    const drawing = svg("svg", { viewBox: `0 0 ${width} 30`, height: 30, role: "img", "aria-label": "Account of the rollouts" });
    let x = 0;
    parts.forEach(([name, count], i) => {
      const size = all ? (count / all) * width : 0;
      const bar = svg("rect", { x, y: 2, width: size, height: 24, fill: colors[i] });
      bar.addEventListener("pointermove", (event) => showTip(event, `${name}: ${format(count)}`));
      bar.addEventListener("pointerleave", hideTip);
      drawing.append(bar);
      x += size;
    });
    return drawing;
  });
  element.append(plot, facts([], parts));
  const extra = Object.entries(ours.faults);
  if (extra.length) element.append(html("h3", { style: "margin-top:12px" }, "Faults and moves"), facts([], extra));
  return element;
}

// Any metric of metrics.jsonl.
function anyMetric() {
  const names = [...new Set(runs.flatMap((run) => run.names))].sort();
  const element = html("section", { class: "card wide", id: "any-metric" }, html("h3", {}, "Any metric"));
  if (!names.length) return element;
  const select = html("select", { id: "metric-select" }, ...names.map((name) => html("option", { value: name }, name)));
  const slot = html("div", {});
  const show = () => {
    const figure = card({ id: "metric", title: select.value, help: "Values from metrics.jsonl.", x: "step", series: bySteps(select.value) });
    figure.className = "";
    slot.replaceChildren(figure);
  };
  select.value = names.includes("train/grad_norm") ? "train/grad_norm" : names[0];
  select.addEventListener("change", show);
  element.append(html("div", { class: "controls" }, html("label", {}, "Metric", select)), slot);
  show();
  return element;
}
