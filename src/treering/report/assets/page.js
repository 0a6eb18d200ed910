// Puts the page together.

function part(title, elements) {
  const shown = elements.filter((element) => element !== null);
  if (!shown.length) return;
  document.getElementById("main").append(html("h2", {}, title), html("div", { class: "cards" }, ...shown));
}

part("Plain against Treering", [comparison()]);
part(isRl ? "Learning" : "Training", learning().map(card));
if (isRl) part("Rollouts of the newest epoch", [forestCard(), originCard()]);
part("Drafts from history", drafting().map(card));
part("Trees", sharing().map(card));
part("Time", phases().map(card));
part("Workers", [timeline(), ...workers().map(card)]);
part("Everything", [...(isRl ? [account()] : []), anyMetric()]);
document.documentElement.dataset.ready = "yes";
