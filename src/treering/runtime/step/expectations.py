"""Expected rollout lengths during a step: the prediction, updated as siblings finish.

Shapes: R rollouts of a step, prompts in order, then samples.
"""

import numpy as np
from numpy.typing import NDArray

from treering.schedule.predict.siblings import expected_lengths


class Expectations:
    """Expected lengths, anew for a group whenever one of its rollouts is over.

    Example: of a group of four that was predicted 100 tokens each, two have ended with 300 and 320: the others are
    expected to have more than 100.
    """

    def __init__(
        self,
        predicted: NDArray[np.float64],
        *,
        believed: NDArray[np.float64],
        group_size: int,
        ratios: NDArray[np.float64],
        max_tokens: int,
    ) -> None:
        """Nothing has started.

        Args:
            predicted: float64 [R] > 0: as the predictor has it.
            believed: float64 [R] > 0: what stands until a sibling is over.
            group_size: rollouts of a prompt.
            ratios: float64 [H] > 0: real over predicted lengths of earlier rollouts.
            max_tokens: no rollout becomes longer.
        """
        self._predicted = predicted
        self._group_size = group_size
        self._ratios = ratios
        self._max_tokens = max_tokens
        self._lengths = np.zeros(predicted.size, np.int64)
        self._so_far = np.zeros(predicted.size, np.int64)
        self._expected = believed.copy()
        self._stale: set[int] = set()

    @property
    def expected(self) -> NDArray[np.float64]:
        """float64 [R]: those of rollouts that are over stay as they were.

        Worked out when they are asked for: most runs move and steal little, and a group's take 0.5 ms.
        """
        while self._stale:
            self._look_anew(self._stale.pop())
        return self._expected

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R]: of rollouts that are over; 0 for others."""
        return self._lengths

    def so_far(self, number: int) -> int:
        """Tokens that a rollout was last said to have."""
        return int(self._so_far[number])

    def note_progress(self, number: int, num_tokens: int) -> None:
        """Takes how far a running rollout is."""
        self._so_far[number] = num_tokens

    def note_over(self, number: int, length: int) -> None:
        """Takes a rollout's length, at least 1; its siblings' expectations follow."""
        self._lengths[number] = length
        self._stale.add(number - number % self._group_size)

    def _look_anew(self, first: int) -> None:
        """Expectations of the open ones of a group, by what its rollouts have and had."""
        group = slice(first, first + self._group_size)
        is_open = self._lengths[group] == 0
        if not is_open.any():
            return
        self._expected[group][is_open] = expected_lengths(
            self._so_far[group][is_open],
            self._lengths[group][~is_open],
            predicted=float(self._predicted[group].mean()),
            ratios=self._ratios,
            max_tokens=self._max_tokens,
        )
