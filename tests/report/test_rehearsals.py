"""The page marks the rehearsed tokens of a rollout that its step kept, and the first one that changed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import treering.report
from tests.models import build_float64
from tests.report.folders import group, write_run
from tests.rl.runs import sampling_loop, steps_in
from treering.data.trajectory import Rehearsed
from treering.report.content import page_content, rehearsal_marks
from treering.report.page import as_html
from treering.report.rollout_views import read_newest

ASSETS = Path(treering.report.__file__).parent / "assets"
NODE = shutil.which("node")
NUM_STEPS = 5
"""Two epochs of three steps, of which the last has the newest two."""

# A document with as much as the card of a rollout uses.
DOCUMENT = """
class Element {
  constructor() { Object.assign(this, { children: [], attributes: {}, textContent: "" }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  addEventListener() {}
  get firstChild() { return this.children[0]; }
}
const document = {
  getElementById: (name) => Object.assign(new Element(), { textContent: name === "data" ? DATA : "" }),
  createElement: () => new Element(),
};
"""
PROBE = """
const shown = originCard();
const all = (element) => [element, ...(element.children ?? []).flatMap(all)];
const found = (test) => all(shown).filter((element) => element.attributes && test(element.attributes));
const seen = content.prompts.map((prompt, p) => prompt.rollouts.map((rollout, r) => {
  choose(p, r);
  const spans = ["prompt-text", "rollout-text"].flatMap((id) => found((one) => one.id === id)[0].children);
  const keys = found((one) => one["data-mark"]).map(({ attributes }) => attributes);
  const legend = keys.map((key) => [key["data-mark"], Number(key["data-value"])]);
  return { classes: spans.map((span) => span.attributes.class.split(" ")), legend };
}));
console.log(JSON.stringify(seen));
"""


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def drawn(page: str) -> list[list[dict[str, Any]]]:
    """Return the classes of each token and the legend's counts, as the page's own scripts draw them."""
    scripts = [(ASSETS / name).read_text() for name in ("chart.js", "figures.js", "forest.js")]
    data = json.dumps(json.dumps(data_of(page)))
    code = "\n".join([f"const DATA = {data};", DOCUMENT, *scripts, PROBE])
    done = subprocess.run([str(NODE), "-"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return seen


def marks_by_hand(num_prompt: int, response: list[int], early: list[int]) -> str:
    """Return the mark of each token, found token by token."""
    marks, has_changed = "-" * num_prompt, False
    for at, token in enumerate(response):
        if has_changed or at >= len(early):
            marks += "-"
        else:
            has_changed = early[at] != token
            marks += "c" if has_changed else "k"
    return marks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], str]]:
    """Return the folder of a run that rehearsed, and the marks of its newest rollouts by prompt and sample."""
    folder = tmp_path_factory.mktemp("run")
    loop, marks = sampling_loop(build_float64(), rehearse="on"), {}
    steps, early = steps_in(folder, loop, NUM_STEPS), {}
    for report in steps:
        for each in loop.latest if report.epoch == 1 else ():
            assert each.tokens is not None
            assert each.loss_mask is not None
            num_prompt, key = int((~each.loss_mask).sum()), (each.task_id, report.epoch, each.trial)
            response = each.tokens.tolist()[num_prompt:]
            if key in early:
                marks[str(each.task_id), int(each.trial or 0)] = marks_by_hand(num_prompt, response, early[key])
        early = {key: tokens.tolist() for key, tokens in loop._sampler.rehearsal.tokens.items()}
    return folder, marks


def test_the_page_of_a_run_marks_each_kept_and_each_first_changed_token(
    trained: tuple[Path, dict[tuple[str, int], str]],
) -> None:
    folder, expected = trained
    content = data_of(as_html(page_content(folder, lambda run: None)))
    found = {
        (prompt["id"], sample): rollout["rehearsed"]
        for prompt in content["prompts"]
        for sample, rollout in enumerate(prompt["rollouts"])
        if rollout["rehearsed"] is not None
    }
    assert found == expected
    text = "".join(expected.values())
    assert text.count("k") > 10
    assert "c" in text
    # Some rehearsals ended before a change, so the token after them is not marked as changed.
    assert any("c" not in marks and "k-" in marks for marks in expected.values())


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_scripts_of_the_page_draw_the_marks_and_count_them(
    trained: tuple[Path, dict[tuple[str, int], str]],
) -> None:
    folder, expected = trained
    page = as_html(page_content(folder, lambda run: None))
    names = [prompt["id"] for prompt in data_of(page)["prompts"]]
    for name, rollouts in zip(names, drawn(page), strict=True):
        for sample, seen in enumerate(rollouts):
            marks = expected.get((name, sample), "-" * len(seen["classes"]))
            letters = ["k" if "kept" in each else "c" if "changed" in each else "-" for each in seen["classes"]]
            assert "".join(letters) == marks
            assert seen["legend"] == [["k", marks.count("k")], ["c", marks.count("c")]]


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_run_without_rehearsals_and_an_older_log_have_no_legend(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert "rehearsed" not in (tmp_path / "run" / "rollouts" / "epoch-001.jsonl").read_text()
    page = as_html(page_content(tmp_path / "run", lambda run: None))
    seen = [rollout for rollouts in drawn(page) for rollout in rollouts]
    assert [each["legend"] for each in seen] == [[]] * 6
    assert not any({"kept", "changed"} & set(classes) for each in seen for classes in each["classes"])


def test_the_log_holds_the_counts_and_a_key_of_another_meaning_is_ignored(
    trained: tuple[Path, dict[tuple[str, int], str]], tmp_path: Path
) -> None:
    folder, expected = trained
    found = [each for each in read_newest(folder, 1).epochs[1] if each.rehearsed is not None]
    assert len(found) == len(expected)
    lines = [json.loads(line) for line in (folder / "rollouts" / "epoch-001.jsonl").read_text().splitlines()]
    assert [line["rehearsed"] for line in lines if "rehearsed" in line] == [list(each.rehearsed) for each in found]
    (tmp_path / "rollouts").mkdir()
    others = ["yes", [1], [1, 2], [2, -1], [2.5, 1], {"of": 3}, None]
    other = [{**lines[0], "rehearsed": value} for value in others]
    (tmp_path / "rollouts" / "epoch-001.jsonl").write_text("".join(json.dumps(each) + "\n" for each in other))
    assert [each.rehearsed for each in read_newest(tmp_path, 1).epochs[1]] == [None] * len(others)


@pytest.mark.parametrize(
    ("num_tokens", "num_kept", "marks"),
    [(0, 0, "-------"), (3, 2, "--kkc--"), (2, 2, "--kk---"), (9, 5, "--kkkkk"), (1, 0, "--c----")],
)
def test_marks_begin_after_the_prompt_and_end_with_the_rollout(num_tokens: int, num_kept: int, marks: str) -> None:
    third = group("a", 0)[2]
    object.__setattr__(third, "rehearsed", Rehearsed(num_tokens, num_kept))
    assert rehearsal_marks(third) == marks
