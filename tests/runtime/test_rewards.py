"""What rewards do to their process costs their rollout at most; one that ends its process for ever ends the run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.models import build_float64
from tests.processes import wait_for_the_end_of
from tests.rl.runs import sampling_loop
from tests.runtime import tasks
from tests.runtime.runs import TinyRecipe, pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_pipeline import Result, assert_same, run
from treering.errors import StateError
from treering.runtime.pipeline import PipelineLoop
from treering.runtime.pools.reward_client import MAX_IN_A_ROW, NUM_RECENT, EndedWorkers

NUM_STEPS = 3
NUM_ROLLOUTS = 8 + 8 + 4


def doing(*names: str, always: bool = False, num_steps: int = NUM_STEPS) -> PipelineLoop:
    return pipeline(TinyRecipe(task=partial(tasks.Doing, *names, always=always)), num_steps=num_steps)


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    with pipeline(num_steps=NUM_STEPS) as loop:
        return run(loop, NUM_STEPS)


def test_what_stays_inside_its_process_changes_nothing_and_ends_with_the_run(undisturbed: Result) -> None:
    # What is printed after stdout was closed raises.
    printing = ("changes the folder", "prints", "forks", "leaves a process")
    for names in (printing, [name for name in tasks.HARMLESS if name not in printing]):
        with doing(*names) as loop:
            result = run(loop, NUM_STEPS)
            account, pids = loop.account, loop.pids
            started = members_of(pids["reward worker"])
        assert_same(result, undisturbed)
        assert is_complete(account, NUM_ROLLOUTS)
        assert (account.reward_errors, account.reward_worker_deaths) == (0, 0)
        assert (len(started) > 1) == ("leaves a process" in names)
        wait_for_the_end_of([*pids.values(), *started])


def members_of(group: int) -> list[int]:
    """The processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[2]) == group:
            members.append(int(entry.name))
    return members


def test_an_exception_that_ends_programs_costs_a_rollout_and_no_process() -> None:
    with doing(*tasks.RAISING, num_steps=1) as loop:
        report, account = loop.step().rollouts, loop.account
    num_errors = 2 * len(tasks.RAISING)
    counts = (report.num_reward_errors, account.reward_errors, account.reward_worker_deaths)
    assert counts == (num_errors, num_errors, 0)
    assert all(any(f"it raised {name}: bye" in message for message in report.reward_errors) for name in tasks.RAISING)
    assert is_complete(account, 8)


@pytest.mark.parametrize("names", [[*tasks.ENDING][:3], [*tasks.ENDING][3:]])
def test_a_rollout_that_ends_its_worker_is_left_out_and_counted(names: list[str]) -> None:
    with doing(*names, num_steps=1) as loop:
        report, account = loop.step().rollouts, loop.account
    assert (report.num_reward_errors, account.reward_errors) == (2 * len(names), 2 * len(names))
    # A signal may have come from outside, so such a rollout gets two more attempts.
    assert account.reward_worker_deaths == sum(2 * (3 if name == "ends itself" else 1) for name in names)
    assert all("its reward ended the reward worker" in message for message in report.reward_errors)
    assert is_complete(account, 8)


def test_a_reward_that_always_ends_its_worker_ends_the_run_in_its_first_step_in_one_line() -> None:
    with doing("crashes", always=True) as loop:
        with pytest.raises(StateError) as caught:
            run(loop, NUM_STEPS)
        assert loop.account.reward_worker_deaths == 8
        assert loop.pids == {}
    text = str(caught.value)
    assert "tests.runtime.tasks.Doing.reward failed for every rollout of step 1, for 8" in text
    assert "its reward ended the reward worker" in text
    assert "\n" not in text


def test_groups_are_rewarded_as_in_the_synchronous_loop_whichever_workers_sampled_them() -> None:
    with pipeline(TinyRecipe(task=tasks.Ranking), num_steps=2) as loop:
        result, account = run(loop, 2), loop.account
    assert_same(result, run(sampling_loop(build_float64("llama"), task=tasks.Ranking()), 2))
    assert (account.unscored, account.evaluated, account.reward_errors) == (4, 16, 0)
    assert all([row[1] for row in rows[:3]] == [0, 1, 2] for rows in result[1])


def test_a_group_whose_reward_hangs_is_left_out_as_a_whole(tmp_path: Path) -> None:
    recipe = TinyRecipe(task=partial(tasks.Ranking, str(tmp_path / "hung")))
    with pipeline(recipe, num_steps=1, reward_time_limit_s=3.0) as loop:
        report, account = loop.step().rollouts, loop.account
    assert (report.num_reward_errors, report.num_rollouts, report.num_unscored) == (4, 3, 1)
    assert (account.reward_workers_stopped, account.evaluated) == (1, 8)
    assert all("TimeoutError" in message for message in report.reward_errors)


@pytest.mark.parametrize(
    ("is_end", "num_noted"),
    [
        (lambda n: True, MAX_IN_A_ROW),
        (lambda n: n % 2 == 0, NUM_RECENT - 1),
        # Three of four, in groups that are too short to count by themselves.
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
