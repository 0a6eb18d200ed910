"""Ends a run whose rewards end or stop their worker again and again."""

from collections import deque

from treering.errors import StateError

MAX_IN_A_ROW = 10
"""Rollouts in a row whose rewards end or stop the worker, and so the run."""

NUM_RECENT = 50
"""Half of so many recent rollouts end the run too."""


class EndedWorkers:
    """Counts the rollouts that were left out because their reward ended its worker or exceeded the time limit.

    Example: ten such rollouts one after another end the run, and so do 25 among 50; one in five never does.
    """

    def __init__(self, reward_name: str) -> None:
        """`reward_name`: see `Task.reward_name`."""
        self._reward_name = reward_name
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)
        self._num_in_a_row = 0

    def note_answer(self) -> None:
        """Notes a reward that was answered, with a number or an error."""
        self._recent.append(False)
        self._num_in_a_row = 0

    def note_end(self, error: str) -> None:
        """Notes a rollout that was left out with this error.

        Raises:
            StateError: it is one too many.
        """
        self._recent.append(True)
        self._num_in_a_row += 1
        if self._num_in_a_row < MAX_IN_A_ROW and 2 * sum(self._recent) < NUM_RECENT:
            return
        raise StateError(
            f"rewards return, and {self._reward_name} ended or stopped its process for {sum(self._recent)} of the "
            f"last {len(self._recent)} rollouts, the latest being {error}; call it on such a rollout by itself and "
            "correct it, then resume with the same command"
        )
