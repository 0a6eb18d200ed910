"""Expected rollout lengths during a step: the prediction, updated as siblings finish.

Shapes: R rollouts of a step, prompts in order, then samples.
"""

import numpy as np
from numpy.typing import NDArray

from treering.schedule.predict.siblings import expected_lengths


class ExpectedLengths:
    """Expected lengths of a step's rollouts; a group's are updated whenever one of its rollouts finishes.

    Example: of a group of four with 100 predicted tokens each, two finish with 300 and 320: the expected lengths of the
    others rise above 100.
    """

    def __init__(
        self,
        predicted: NDArray[np.float64],
        *,
        initial: NDArray[np.float64],
        group_size: int,
        ratios: NDArray[np.float64],
        max_tokens: int,
    ) -> None:
        """Starts before the first rollout.

        Args:
            predicted: float64 [R] > 0: the predictor's lengths.
            initial: float64 [R] > 0: expected lengths until a sibling finishes.
            group_size: rollouts per prompt.
            ratios: float64 [H] > 0: actual over predicted lengths of earlier rollouts.
            max_tokens: of a rollout, at most.
        """
        self._predicted = predicted
        self._group_size = group_size
        self._ratios = ratios
        self._max_tokens = max_tokens
        self._lengths = np.zeros(predicted.size, np.int64)
        self._so_far = np.zeros(predicted.size, np.int64)
        self._expected = initial.copy()
        self._stale: set[int] = set()

    @property
    def expected(self) -> NDArray[np.float64]:
        """float64 [R]; those of finished rollouts keep their last value.

        Computed lazily: most runs move and steal little, and one group takes 0.5 ms.
        """
        while self._stale:
            self._update_group(self._stale.pop())
        return self._expected

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R]: lengths of finished rollouts, 0 for the others."""
        return self._lengths

    def so_far(self, number: int) -> int:
        """Tokens that a rollout had at its last report."""
        return int(self._so_far[number])

    def note_progress(self, number: int, num_tokens: int) -> None:
        """Records the tokens of a running rollout."""
        self._so_far[number] = num_tokens

    def note_finished(self, number: int, length: int) -> None:
        """Records the length of a finished rollout, at least 1; updates its siblings."""
        self._lengths[number] = length
        self._stale.add(number - number % self._group_size)

    def _update_group(self, first: int) -> None:
        """Recomputes the unfinished rollouts of a group."""
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
