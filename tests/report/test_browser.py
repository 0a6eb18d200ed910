"""The page in a browser: it draws without an error, shows the run's numbers, and its choices work."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import CONFIG, group, write_run, write_timeline
from treering.data import write_trajectories
from treering.report.content import page_content
from treering.report.page import as_html
from treering.report.run_data import note_start

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs chromium")

# Records errors from the first script on.
WATCH = """<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message)));
console.error = (...words) => errors.push(words.join(" "));
</script>"""
# Runs after the page's own script, chooses as a reader does, and records what the page shows then.
PROBE = """<script>
{
const choose = (id, value) => {
  const select = document.getElementById(id);
  select.value = value;
  select.dispatchEvent(new Event("change"));
};
const cells = id => {
  document.querySelector(`#${id} details`).open = true;
  document.querySelector(`#${id} details`).dispatchEvent(new Event("toggle"));
  const rows = [...document.querySelectorAll(`#${id} tbody tr`)];
  return rows.map(row => [...row.querySelectorAll("[data-value]")].map(cell => Number(cell.dataset.value)));
};
const seen = { first: document.getElementById("rollout-text").textContent };
choose("prompt-select", "1");
seen.prompt = document.getElementById("rollout-text").textContent;
choose("rollout-select", "2");
seen.rollout = document.getElementById("rollout-text").textContent;
const spans = [...document.querySelectorAll("#prompt-text i, #rollout-text i")];
seen.letters = spans.map(span => span.className[0]).join("");
seen.folded = document.getElementById("prompt-text").textContent;
const tableRows = () => [...document.querySelectorAll("#table tbody tr")].map(row => row.children[0].textContent);
seen.worst = tableRows();
choose("order-select", "best first");
seen.best = tableRows();
const search = document.getElementById("search");
search.value = "<44>";
search.dispatchEvent(new Event("input"));
seen.found = tableRows();
document.querySelector("#table tbody tr").click();
seen.clicked = document.getElementById("rollout-text").textContent;
choose("metric-select", "train/loss");
const finish = triesLeft => {
  const undrawn = [...document.querySelectorAll("section.card .plot")].filter(plot => !plot.querySelector("svg"));
  if (undrawn.length && triesLeft) return setTimeout(finish, 20, triesLeft - 1);
  seen.reward = cells("reward");
  seen.length = cells("length");
  seen.metric = cells("any-metric");
  const plots = [...document.querySelectorAll("section.card .plot")];
  seen.images = plots.map(plot => plot.querySelectorAll("svg rect, svg path").length);
  seen.spans = document.querySelectorAll("#timeline .plot rect").length;
  seen.bars = document.querySelectorAll("#forest .plot rect").length;
  seen.ready = document.documentElement.dataset.ready;
  seen.width = document.documentElement.scrollWidth <= innerWidth;
  seen.errors = errors;
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(seen);
  document.body.append(answer);
};
finish(100);
}
</script>"""


# A window is wider than a phone, so the page is in a frame.
NARROW = """<!doctype html><style></style><body>
<iframe style="width:360px;height:800px;border:0" srcdoc="{page}"></iframe></body>"""
WIDTHS = """<script>
onload = () => setTimeout(() => {
  const inner = document.querySelector("iframe").contentWindow;
  const answer = document.createElement("pre");
  answer.id = "answer";
  const page = inner.document.documentElement;
  const fits = page.scrollWidth <= page.clientWidth;
  answer.textContent = JSON.stringify({ ready: page.dataset.ready, fits, width: inner.innerWidth });
  document.body.append(answer);
}, 1000);
</script>"""


ANSWER = """<script>
setTimeout(() => {
const answer = document.createElement("pre");
answer.id = "answer";
const count = (selector) => document.querySelectorAll(selector).length;
answer.textContent = JSON.stringify({
  errors, ready: document.documentElement.dataset.ready,
  forests: count("#forest svg"), finals: [...document.querySelectorAll("#finals tbody tr")].map(row => row.textContent),
  marks: count("#loss .resumed, #reward .resumed"), differences: count("#differences tbody tr"),
});
document.body.append(answer);
}, 500);
</script>"""


def shown(tmp_path: Path, page: str, probe: str, width: int = 1280) -> dict[str, Any]:
    """Return what a probe finds on a page in a browser, without a network."""
    file = tmp_path / "page.html"
    file.write_text(page.replace("<style>", WATCH + "<style>", 1).replace("</body>", probe + "</body>"))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1000", "--virtual-time-budget=5000",
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    document = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    answer = re.search('<pre id="answer">(.*?)</pre>', document, re.DOTALL)
    assert answer is not None, document[-2000:]
    found: dict[str, Any] = json.loads(unescape(answer[1]))
    return found


@pytest.mark.parametrize("width", [1280, 500])
def test_a_page_draws_shows_the_numbers_of_the_run_and_follows_its_choices(tmp_path: Path, width: int) -> None:
    rows = write_run(tmp_path / "run")
    spans = write_timeline(tmp_path / "run", num_steps=4)
    page = as_html(page_content(tmp_path / "run", lambda run: lambda token: f"<{token}>"))
    seen = shown(tmp_path, page, PROBE, width)
    assert seen["errors"] == []
    assert seen["ready"] == "yes"
    assert seen["width"]
    assert seen["reward"] == [[each["reward/mean"]] for each in rows]
    assert seen["length"] == [[each["rollout/length_mean"]] for each in rows]
    assert seen["metric"] == [[each["train/loss"]] for each in rows]
    assert all(seen["images"])
    # A bar per span and an empty one per process.
    assert seen["spans"] == len(spans) + 3
    # Five segments, and the three rows' places and the frame of the chosen one.
    assert seen["bars"] >= 9
    assert seen["first"] == "".join(f"<{token}>" for token in [10, 11, 12, 13, 20, 21, 22])
    assert seen["prompt"] == "".join(f"<{token}>" for token in [10, 11, 12, 13, 20, 21, 22])
    assert seen["rollout"] == "".join(f"<{token}>" for token in [40, 41, 42, 43, 44])
    assert seen["folded"] == "<3><4>"
    assert seen["letters"].startswith("gg")
    assert len(seen["letters"]) == 7
    assert seen["worst"] == ["0", "0", "0.5", "0.5", "1", "1"]
    assert seen["best"] == seen["worst"][::-1]
    assert seen["found"] == ["0", "0"]
    assert seen["clicked"] == seen["rollout"]


def test_a_run_before_its_first_step_draws_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    page = as_html(page_content(tmp_path / "run", lambda run: None))
    seen = shown(tmp_path, page, ANSWER)
    assert (seen["errors"], seen["ready"], seen["marks"]) == ([], "yes", 0)


def test_runs_are_compared_with_marks_where_they_were_resumed(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    rows = write_run(tmp_path / "b", num_steps=6, config=CONFIG | {"optim": {"learning_rate": 1e-5}})
    note_start(tmp_path / "b", {"step": 0})
    note_start(tmp_path / "b", {"step": 3})
    page = as_html(page_content(tmp_path / "a", lambda run: None, others=[tmp_path / "b"]))
    seen = shown(tmp_path, page, ANSWER)
    assert (seen["errors"], seen["ready"], seen["forests"]) == ([], "yes", 0)
    assert seen["finals"][0] == "steps46"
    assert f"loss0.5{rows[-1]['train/loss']}" in seen["finals"]
    assert (seen["marks"], seen["differences"]) == (1, 1)


def test_a_supervised_run_shows_the_trees_of_its_data_and_fits_a_phone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_trajectories(tmp_path / "run" / "samples.jsonl", group("a", 0))
    (tmp_path / "run" / "config.json").write_text(json.dumps({"train": {"num_steps": 4, "a_long_name": "x" * 400}}))
    supervised = as_html(page_content(tmp_path / "run", lambda run: None))
    seen = shown(tmp_path, supervised, ANSWER)
    assert (seen["errors"], seen["ready"], seen["forests"]) == ([], "yes", 1)
    write_run(tmp_path / "rl")
    for page in (supervised, as_html(page_content(tmp_path / "rl", lambda run: lambda token: f"<{token}>" * 9))):
        seen = shown(tmp_path, NARROW.format(page=escape(page)), WIDTHS)
        assert seen == {"ready": "yes", "fits": True, "width": 360}
