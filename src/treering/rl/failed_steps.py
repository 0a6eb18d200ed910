"""Ends a run whose every reward fails, which would otherwise train nothing to its end."""

from treering.errors import StateError
from treering.rl.collect import Collected

MAX_FAILED_STEPS = 3
"""Steps in a row without any reward that end a run."""


class FailedSteps:
    """Counts the steps in a row in which every reward failed.

    Example: with steps of 8 rollouts, 8, 8, 7, 8, 8 and 8 failures end the run at the sixth step.
    """

    def __init__(self, reward_name: str) -> None:
        """`reward_name`: see `Task.reward_name`."""
        self._reward_name = reward_name
        self._count = 0

    def note(self, step: int, collected: Collected) -> None:
        """Notes a sampled step; call it in order.

        Raises:
            StateError: every reward of the last `MAX_FAILED_STEPS` steps failed.
        """
        has_failed = collected.num_rollouts == 0 and collected.num_reward_errors > 0
        self._count = self._count + 1 if has_failed else 0
        if self._count < MAX_FAILED_STEPS:
            return
        raise StateError(
            f"a run learns from rewards, and {self._reward_name} failed for every rollout of {MAX_FAILED_STEPS} steps "
            f"in a row, in step {step} for {collected.num_reward_errors}, with {collected.reward_errors[0]}; correct it"
        )
