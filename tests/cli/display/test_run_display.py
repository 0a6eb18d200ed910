"""The steps of a run are a panel on a terminal, and a few plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from treering.cli.display import progress
from treering.cli.display.run_display import RunDisplay


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_evaluation_is_shown_at_once(*, is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)
    with RunDisplay(title="runs/a", num_steps=40, first_step=0, console=console) as display:
        display.show_evaluation(3, {"eval/loss": 2.317, "eval/num_tokens": 50})
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert ("eval loss 2.317 after step 3" in text) if is_terminal else (text == "step 3/40: eval loss 2.317\n")


def shown_of_a_step(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False, quiet: bool = False) -> str:
    """What a step of 1,000 micro-batches of 50 tokens shows, one each second; then the step is done."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None, quiet=quiet)
    with RunDisplay(title="runs/a", num_steps=4, first_step=1, console=console) as display:
        for now in range(1001):
            display.show_phase("training", 50 * now, 50_000)
        display.show({"step": 2, "train/loss": 2.0})
        for now in range(1001, 1031):
            display.show_phase("training", 50 * (now - 1001), 50_000)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_off_a_terminal_a_long_step_is_a_line_each_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    *running, done, following = shown_of_a_step(monkeypatch).splitlines()
    assert len(running) == 1000 // 30
    assert running[0] == "step 2/4: training 1,500 of 50,000 tokens, 16 min 10 s left"
    assert running[-1] == "step 2/4: training 49,500 of 50,000 tokens, 10 s left"
    assert done == "step 2/4 loss 2.000"
    # A line of a step counts too: the next one comes 30 s after it.
    assert following == "step 3/4: training 1,450 of 50,000 tokens, 16 min 11 s left"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_ranks_after_the_first_show_nothing_of_their_steps(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    assert shown_of_a_step(monkeypatch, is_terminal=is_terminal, quiet=True) == ""
