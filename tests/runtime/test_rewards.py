"""A reward that ends its process, or never returns, costs only its rollout; one that always does ends the run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.models import build_float64
from tests.rl.runs import sampling_loop
from tests.runtime import tasks
from tests.runtime.runs import TinyRecipe, pipeline
from tests.runtime.test_deaths import is_complete, tick
from tests.runtime.test_pipeline import assert_same, run
from treering.errors import StateError
from treering.runtime import rewards
from treering.runtime.pipeline import PipelineLoop
from treering.runtime.rewards import MAX_IN_A_ROW, NUM_RECENT, EndedWorkers


def doing(*names: str, always: bool = False) -> PipelineLoop:
    return pipeline(TinyRecipe(task=partial(tasks.Doing, *names, always=always)), num_steps=1)


def test_an_exception_that_ends_programs_costs_a_rollout_and_no_process() -> None:
    with doing(*tasks.RAISING) as loop:
        report, account = loop.step().rollouts, loop.account
    num_errors = 2 * len(tasks.RAISING)
    counts = (report.num_reward_errors, account.reward_errors, account.reward_worker_deaths)
    assert counts == (num_errors, num_errors, 0)
    assert all(any(f"got {name}: bye" in message for message in report.reward_errors) for name in tasks.RAISING)
    assert is_complete(account, 8)


def test_a_rollout_that_ends_its_worker_three_times_is_left_out_and_counted() -> None:
    with doing("dies") as loop:
        report, account = loop.step().rollouts, loop.account
    # One of each group.
    assert (report.num_reward_errors, account.reward_errors, account.reward_worker_deaths) == (2, 2, 6)
    assert all("its reward ended the reward worker 3 times" in message for message in report.reward_errors)
    assert is_complete(account, 8)


def test_a_reward_that_always_ends_its_worker_ends_the_run_in_its_first_step_in_one_line() -> None:
    with doing("dies", always=True) as loop:
        with pytest.raises(StateError) as caught:
            loop.step()
        assert loop.account.reward_worker_deaths == 3 * 8
    text = str(caught.value)
    assert "tests.runtime.tasks.Doing.reward failed for every rollout of step 1" in text
    assert "its reward ended the reward worker" in text
    assert "\n" not in text


def test_groups_are_rewarded_as_in_the_synchronous_loop_whichever_workers_sampled_them() -> None:
    with pipeline(TinyRecipe(task=tasks.Ranking), num_steps=2) as loop:
        result, account = run(loop, 2), loop.account
    assert_same(result, run(sampling_loop(build_float64("llama"), task=tasks.Ranking()), 2))
    assert (account.unscored, account.evaluated, account.reward_errors) == (4, 16, 0)
    assert all([row[1] for row in rows[:3]] == [0, 1, 2] for rows in result[1])


def test_a_group_whose_reward_hangs_is_left_out_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch, rewards)
    recipe = TinyRecipe(task=partial(tasks.Ranking, str(tmp_path / "hung")))
    with pipeline(recipe, num_steps=1, reward_time_limit_s=1000.0) as loop:
        report, account = loop.step().rollouts, loop.account
    assert (report.num_reward_errors, report.num_rollouts, report.num_unscored) == (4, 3, 1)
    assert (account.reward_workers_stopped, account.evaluated) == (1, 8)
    assert all("TimeoutError" in message for message in report.reward_errors)


@pytest.mark.parametrize(
    ("is_end", "num_noted"),
    [
        (lambda n: True, MAX_IN_A_ROW),
        (lambda n: n % 2 == 0, NUM_RECENT - 1),
        # Three of four, in groups that are too short to count separately.
        (lambda n: n % 8 < 6, 33),
        (lambda n: n % 5 == 0, None),
    ],
)
def test_ten_in_a_row_or_half_of_the_last_fifty_end_a_run(is_end: Callable[[int], bool], num_noted: int | None) -> None:
    ended_workers = EndedWorkers("judge")
    for n in range(1000):
        if not is_end(n):
            ended_workers.note_answer()
        elif n + 1 != num_noted:
            ended_workers.note_end("x")
        else:
            with pytest.raises(StateError, match="judge ended or stopped its process for"):
                ended_workers.note_end("x")
            return
    assert num_noted is None
