"""Ends a run whose every reward fails, which would otherwise train nothing to its end."""

from treering.errors import StateError
from treering.rl.collect import Collected

MAX_FAILED_STEPS = 3
"""Steps in a row without any reward that end a run; before its first reward it is one."""


class FailedSteps:
    """Counts the steps in a row in which every reward failed.

    A run has its first reward in step 1, so a resumed one has had it.

    Example: with steps of 8 rollouts, 7, 8, 8, 7, 8, 8 and 8 failures end the run at the seventh step; 8 end it at the
    first.
    """

    def __init__(self, reward_name: str) -> None:
        """`reward_name`: see `Task.reward_name`."""
        self._reward_name = reward_name
        self._count = 0

    def note(self, step: int, collected: Collected) -> None:
        """Notes a sampled step; call it in order.

        Raises:
            StateError: every reward of the last `MAX_FAILED_STEPS` steps failed, or of step 1.
        """
        has_failed = collected.num_rollouts == 0 and collected.num_reward_errors > 0
        self._count = self._count + 1 if has_failed else 0
        if self._count < (1 if step == 1 else MAX_FAILED_STEPS):
            return
        steps = "step 1," if step == 1 else f"{MAX_FAILED_STEPS} steps in a row, in step {step}"
        error, count = max(collected.error_counts.items(), key=lambda item: item[1])
        raise StateError(
            f"a run learns from rewards, and {self._reward_name} failed for every rollout of {steps} for "
            f"{collected.num_reward_errors}; {count} times with {error}; one of them is "
            f"{collected.reward_errors[0]}; correct it"
        )
