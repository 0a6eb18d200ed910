// The tree of an episode of the newest step, with a selector: calls as bars along the paths of their contexts.

const agentColor = (agent) => (agent < 0 ? "var(--idle)" : styleOf(agent).color);

function drawEpisode(episode, width) {
  const rows = episode.rows.length;
  const high = Math.max(9, Math.min(26, Math.floor(620 / rows)));
  const right = 178;
  const depth = Math.max(...episode.spans.map(([start, length]) => start + length));
  const scale = (width - right) / depth;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${rows * high + 24}`, height: rows * high + 24, role: "img", "aria-label": `Tree of an episode of ${episode.id}` });
  drawing.append(svg("text", { x: width - right + 10, y: 12 }, "agent"), svg("text", { x: width, y: 12, "text-anchor": "end" }, "reward"));
  for (const [start, length, top, bottom, agent, call, words] of episode.spans) {
    const box = { x: start * scale + 0.5, y: 18 + top * high + 0.5, width: Math.max(1, length * scale - 1), height: (bottom - top) * high - 1, rx: 2, fill: agentColor(agent) };
    const bar = svg("rect", { ...box, "data-agent": agent, "data-call": call });
    const what = agent < 0 ? "read" : `sampled by call ${call + 1} of ${episode.agents[agent]}`;
    const shared = bottom - top > 1 ? `, computed once for ${bottom - top} branches` : "";
    bar.addEventListener("pointermove", (event) => showTip(event, `${format(length)} token${length > 1 ? "s" : ""} ${what}${shared}\n${words}`));
    bar.addEventListener("pointerleave", hideTip);
    drawing.append(bar);
  }
  episode.rows.forEach(([agent, reward], row) => {
    const y = 18 + row * high + high / 2 + 4;
    drawing.append(svg("text", { class: "ink", x: width - right + 10, y }, episode.agents[agent].slice(0, 16)));
    drawing.append(svg("text", { class: "ink", x: width, y, "text-anchor": "end" }, format(reward)));
  });
  return drawing;
}

function episodeCard() {
  const { episodes } = content;
  if (!episodes?.length) return null;
  const element = html("section", { class: "card wide", id: "episode" }, html("h3", {}, `One episode of step ${episodes[0].step}: the tree of its calls`));
  element.append(html("p", { class: "help" }, "From left to right, tokens: grey ones were read, coloured ones sampled, in one colour per agent. Each row is a branch; a new one begins where a context was rewritten, or sampled again."));
  const names = episodes.map((episode, i) => html("option", { value: i }, `${oneLine(episode.id)}${episode.trial === null ? "" : `, run ${episode.trial + 1}`}: ${format(episode.rows.length)} branch${episode.rows.length > 1 ? "es" : ""}`));
  const select = html("select", { id: "episode-select" }, ...names);
  const line = html("span", { class: "status", id: "episode-line" });
  const keys = html("div", { class: "legend" });
  const plot = html("div", { class: "plot" });
  const chosen = () => episodes[Number(select.value)];
  const show = () => {
    const episode = chosen();
    const shared = episode.num_branch_tokens / episode.num_tokens;
    const waits = episode.wait_s ? `, waited ${format(episode.wait_s)} s` : "";
    line.textContent = `${format(episode.num_calls)} calls in ${format(episode.rows.length)} branches${waits}; ${format(episode.num_branch_tokens)} tokens, ${format(episode.num_tokens)} computed (${shared.toFixed(2)}x)`;
    const key = (name, agent) => html("span", {}, svg("svg", { width: 14, height: 12 }, svg("rect", { width: 12, height: 12, rx: 2, fill: agentColor(agent) })), ` ${name}`);
    keys.replaceChildren(key("read", -1), ...episode.agents.map(key));
    if (plot.clientWidth) plot.replaceChildren(drawEpisode(episode, Math.floor(plot.clientWidth)));
  };
  select.addEventListener("change", show);
  fitted(plot, (width) => drawEpisode(chosen(), width));
  element.append(html("div", { class: "controls" }, html("label", {}, "Episode", select), line), keys, plot);
  show();
  return element;
}
