"""A run whose every reward fails ends after a few steps; one that gets some rewards goes on."""

import pytest

from tests.rl.runs import TinyTask, scripted_loop, share_of_even_tokens
from treering.engine.rollout import Rollout
from treering.errors import StateError
from treering.rl.failed_steps import MAX_FAILED_STEPS


class Failing:
    """A reward that fails in the calls that `fails` names."""

    def __init__(self, *, good_calls: frozenset[int] = frozenset()) -> None:
        self.num_calls = 0
        self._good_calls = good_calls

    def __call__(self, rollout: Rollout) -> float:
        self.num_calls += 1
        if self.num_calls in self._good_calls:
            return share_of_even_tokens(rollout)
        raise SystemExit("no judge")


def test_a_run_whose_every_reward_fails_ends_after_three_steps_and_names_the_function() -> None:
    loop = scripted_loop(task=TinyTask(2, Failing()))
    for _ in range(MAX_FAILED_STEPS - 1):
        assert loop.step().rollouts.num_reward_errors == 8
    with pytest.raises(
        StateError, match=r"runs\.TinyTask\.reward failed for every rollout of 3 steps in a row, in step 3 for 8.*judge"
    ):
        loop.step()
    assert (loop.num_steps_done, loop.version) == (MAX_FAILED_STEPS - 1, 0)


def test_one_reward_in_three_steps_keeps_a_run_alive() -> None:
    # Two groups of four: the 17th call belongs to the third step, the 41st to the sixth.
    loop = scripted_loop(task=TinyTask(2, Failing(good_calls=frozenset({17, 41}))))
    for _ in range(8):
        loop.step()
    with pytest.raises(StateError, match="step 9"):
        loop.step()
