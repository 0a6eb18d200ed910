// Assembles the page.

function part(title, elements) {
  const shown = elements.filter((element) => element !== null);
  if (!shown.length) return;
  document.getElementById("main").append(html("h2", {}, title), html("div", { class: "cards" }, ...shown));
}

part("Plain against Treering", [comparison()]);
if (isCompared) part("Comparison", finals());
part(isRl ? "Learning" : "Training", [...learning(), ...optional()].map(card));
if (!isCompared) part(isRl ? "Rollouts of the newest epoch" : "Samples of the data", [forestCard(), episodeCard(), originCard(), rolloutTable()]);
part("Drafts from history", drafting().map(card));
part("Trees", sharing().map(card));
part("Time", phases().map(card));
part("Workers", [isCompared ? null : timeline(), ...workers().map(card)]);
part("Everything", [...(isRl && !isCompared ? [account()] : []), anyMetric(), ...aboutCards()]);
// Reload while the run trains, because the command then rewrites the page.
if (content.refresh_s) setTimeout(() => location.reload(), 1000 * content.refresh_s);
document.documentElement.dataset.ready = "yes";
