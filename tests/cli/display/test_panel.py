"""The panel of a run says what its rows of metrics say."""

import pytest

from tests.report.folders import row
from treering.cli.display.panel import PanelState, as_line


def state_of(*rows: dict[str, float], num_steps: int | None = 10) -> PanelState:
    state = PanelState(title="runs/a", num_steps=num_steps)
    for each in rows:
        state.add(each)
    return state


def test_the_time_left_is_that_of_the_newest_steps() -> None:
    slow = [row(step) | {"time/step_s": 100.0} for step in (1, 2)]
    state = state_of(*slow, *(row(step) for step in range(3, 11)), num_steps=25)
    assert state.seconds_left == pytest.approx(15 * 4.0)
    assert as_line(state).endswith(", 1 min 0 s left")
    assert state_of(row(1), num_steps=None).seconds_left is None


def test_figures_are_those_of_the_newest_step_and_totals_sums_over_all() -> None:
    newest = "step 3/10 reward 0.188 tokens/s 90 tokens/forward 4.00 drafts accepted 50%"
    sums = "12 s so far, 360 tokens sampled, 1,206 tokens trained"
    assert as_line(state_of(row(1), row(2), row(3))) == f"{newest}, {sums}, 28 s left"


def test_rows_without_numbers_leave_what_was_known() -> None:
    state = state_of(row(1), {"step": 2, "rollout/num_sampled": 1, "reward/mean": "nan"})  # type: ignore[dict-item]
    assert state.step == 2
    assert state.score == "reward 0.062"
