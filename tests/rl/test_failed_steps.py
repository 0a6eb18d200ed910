"""A run whose rewards all fail ends at once, or after a few steps; one that gets some rewards continues."""

import pytest

from tests.rl.runs import TinyTask, scripted_loop, share_of_even_tokens
from treering.engine.protocol import Rollout
from treering.errors import StateError
from treering.rl.sampler import MAX_FAILED_STEPS


class Failing:
    """Reward that fails in all calls but `good_calls`."""

    def __init__(self, *, good_calls: frozenset[int] = frozenset()) -> None:
        self.num_calls = 0
        self._good_calls = good_calls

    def __call__(self, rollout: Rollout) -> float:
        self.num_calls += 1
        if self.num_calls in self._good_calls:
            return share_of_even_tokens(rollout)
        raise SystemExit("no judge")


def test_a_run_without_a_first_reward_ends_in_its_first_step_and_names_function_and_error() -> None:
    loop = scripted_loop(task=TinyTask(2, Failing()))
    with pytest.raises(
        StateError,
        match=r"no judge; catch it \(8 of 8 rollouts; .*runs\.TinyTask\.reward failed for every rollout of step 1\)",
    ):
        loop.step()
    assert (loop.num_steps_done, loop.version) == (0, 0)


def test_a_run_whose_every_reward_fails_later_ends_after_three_steps() -> None:
    loop = scripted_loop(task=TinyTask(2, Failing(good_calls=frozenset({1}))))
    assert loop.step().rollouts.num_reward_errors == 7
    for _ in range(MAX_FAILED_STEPS - 1):
        assert loop.step().rollouts.num_reward_errors == 8
    with pytest.raises(StateError, match=r"of steps 2 to 4\)"):
        loop.step()
    assert loop.num_steps_done == MAX_FAILED_STEPS


def test_one_reward_in_three_steps_keeps_a_run_alive() -> None:
    # Two groups of four: the 17th call belongs to the third step, the 41st to the sixth.
    loop = scripted_loop(task=TinyTask(2, Failing(good_calls=frozenset({1, 17, 41}))))
    for _ in range(8):
        loop.step()
    with pytest.raises(StateError, match="steps 7 to 9"):
        loop.step()
