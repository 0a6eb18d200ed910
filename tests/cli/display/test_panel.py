"""The panel of a run says what its rows of metrics say."""

import io

import pytest
from rich.console import Console

from tests.report.folders import row
from treering.cli.display.panel import PanelState, as_line, as_panel, sparkline


def state_of(*rows: dict[str, float], num_steps: int | None = 10) -> PanelState:
    state = PanelState(title="runs/a", num_steps=num_steps)
    for each in rows:
        state.add(each)
    return state


def test_the_panel_shows_the_newest_row() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(as_panel(state_of(row(1), row(2), row(3))))
    text = console.export_text()
    for part in ("runs/a", "step 3/10", "reward 0.188  ▁▅█", "tokens/s 90", "tokens/forward 4.00", "accepted 50%"):
        assert part in text
    # Of 4 s a step, 2 are rollouts, 1 training and 0.25 updates.
    assert "rollout 50%  training 25%  update 6%  other 19%" in text


def test_the_time_left_is_that_of_the_newest_steps() -> None:
    slow = [row(step) | {"time/step_s": 100.0} for step in (1, 2)]
    state = state_of(*slow, *(row(step) for step in range(3, 11)), num_steps=25)
    assert state.seconds_left == pytest.approx(15 * 4.0)
    assert as_line(state).endswith(", 1 min 0 s left")
    assert state_of(row(1), num_steps=None).seconds_left is None


def test_a_supervised_run_shows_its_loss() -> None:
    rows = [{"step": step, "train/loss": 5.0 - step, "time/step_s": 2.0, "time/tokens_per_s": 1e4} for step in (1, 2)]
    assert as_line(state_of(*rows)) == "step 2/10 loss 3.000 tokens/s 10,000, 4 s so far, 16 s left"


def test_totals_are_sums_over_the_steps() -> None:
    sums = "12 s so far, 360 tokens sampled, 1,206 tokens trained"
    assert f", {sums}, 28 s left" in as_line(state_of(row(1), row(2), row(3)))


def test_rows_without_numbers_leave_what_was_known() -> None:
    state = state_of(row(1), {"step": 2, "rollout/num_sampled": 1, "reward/mean": "nan"})  # type: ignore[dict-item]
    assert state.step == 2
    assert state.scores.startswith("reward 0.062")


def test_a_sparkline_runs_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_the_newest_evaluation_stays_on_the_panel() -> None:
    first = {"step": 0, "eval/reward": 0.25, "eval/pass_at_1": 0.25, "eval/pass_at_2": 0.5, "eval/length_mean": 9.0}
    state = state_of(first)
    assert state.evaluation == "eval reward 0.250   pass@1 0.250   pass@2 0.500 after step 0"
    state.add(row(1))
    assert state.evaluation.endswith("after step 0")
    assert state.scores.startswith("reward 0.062")
    state.add(row(2) | {"eval/loss": 1.5})
    assert state.evaluation == "eval loss 1.500 after step 2"
    assert state_of(row(1)).evaluation == ""
