"""Progress of steps, other work and long silences: a bar on a terminal, a line now and then in a log."""

import io
from importlib import import_module
from pathlib import Path

import pytest

from tests.report.folders import row
from treering import metrics
from treering.cli import display
from treering.cli.display import (
    PlainConsole,
    RunDisplay,
    WorkProgress,
    facts_table,
    note_compiling,
    step_figures,
)


def test_an_evaluation_is_printed_at_once() -> None:
    console = PlainConsole(file=io.StringIO(), width=100)
    with RunDisplay(title="runs/a", num_steps=40, first_step=0, console=console) as shown:
        shown.show_evaluation(3, {"eval/loss": 2.317, "eval/num_tokens": 50})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "step 3/40: eval loss 2.317\n"


def test_a_terminal_shows_the_step_and_its_figures() -> None:
    console = PlainConsole(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with RunDisplay(title="runs/a", num_steps=40, first_step=0, console=console) as shown:
        shown.show(3, step_figures(row(3)))
    assert isinstance(console.file, io.StringIO)
    assert "3/40" in console.file.getvalue()
    assert "reward 0.188 tokens/s 90 tokens/forward 4.00 drafts accepted 50%" in console.file.getvalue()


def test_figures_are_those_that_a_step_has() -> None:
    assert step_figures({"step": 2, "rollout/num_sampled": 1, "reward/mean": "nan"}) == "reward -"
    row_of_loss = {"step": 2, "train/loss": 2.0, metrics.TOKENS_PER_S: 7910.0}
    assert step_figures(row_of_loss) == "loss 2.000 tokens/s 7,910"


def shown_of_a_step(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False, quiet: bool = False) -> str:
    """Return what is shown of a step of 1,000 micro-batches of 50 tokens, one each second, until the step is done."""
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    console = PlainConsole(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None, quiet=quiet)
    with RunDisplay(title="runs/a", num_steps=4, first_step=1, console=console) as shown:
        for now in range(1001):
            shown.show_phase("training", 50 * now, 50_000)
        shown.show(2, step_figures({"train/loss": 2.0}))
        for now in range(1001, 1031):
            shown.show_phase("training", 50 * (now - 1001), 50_000)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_off_a_terminal_a_long_step_is_a_line_each_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    *running, done, following = shown_of_a_step(monkeypatch).splitlines()
    assert len(running) == 1000 // 30
    assert running[0] == "step 2/4: training 1,500 of 50,000 tokens, 16 min 10 s left"
    assert running[-1] == "step 2/4: training 49,500 of 50,000 tokens, 10 s left"
    assert done == "step 2/4 loss 2.000"
    # A line about a step counts too: the next one comes 30 s after it.
    assert following == "step 3/4: training 1,450 of 50,000 tokens, 16 min 11 s left"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_ranks_after_the_first_show_nothing_of_their_steps(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    assert shown_of_a_step(monkeypatch, is_terminal=is_terminal, quiet=True) == ""


def test_work_off_a_terminal_is_a_line_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with WorkProgress(PlainConsole(stderr=True)) as shown:
        for seconds, words, done in (
            (500.0, "a case", None),
            (1000.0, "math", 0.0),
            (1060.0, "math: one_by_one done", 0.1),
            (1120.0, "math: tree done", 0.2),
            (1150.0, "text", 0.25),
            (1300.0, "text: tree done", 0.9),
        ):
            now = seconds
            shown.show(words, done)
        now, count = 2000.0, shown.counting("drafting", 400)
        count(100)
    # The share grew by 0.1 a minute from 1000 s on; at 1300 s, 0.1 is left, and 0.9 took 300 s.
    assert capsys.readouterr().err.splitlines() == [
        "math, 0%",
        "math: tree done, 20%, about 8 min left",
        "text: tree done, 90%, less than a minute left",
        "drafting, 25%",
    ]


def test_compiling_is_announced_while_the_cache_has_no_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "jitted.py").write_text("from numba import njit\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    twice = import_module("jitted").twice
    note_compiling(PlainConsole(stderr=True), twice)
    assert capsys.readouterr().err == (
        "compiling functions with numba, once after installation: twice; this takes some seconds\n"
    )
    assert twice(3) == 6
    note_compiling(PlainConsole(stderr=True), twice)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["pip install 'treering[train]'", "runs/:key:", "a :bug: in [bold]x[/bold]", "[/]"])
def test_every_text_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = facts_table(text, {text: text})
    PlainConsole(width=200).print(text, table)
    out = capsys.readouterr().out
    assert out.startswith(text)
    assert out.count(text) == 4
