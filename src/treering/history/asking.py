"""Whether a step asks the others: what runs in other groups, and the history of other prompts.

Knows rows, and tokens that were accepted from there. Knows nothing of how others are asked, and reads no clock.

    D drafted tokens
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.history.features import FIRST, NUM_LENGTHS, NUM_SOURCES, OTHERS

BoolArray = NDArray[np.bool_]
Float64Array = NDArray[np.float64]

_ASK_S = 1.5e-6
"""Of a row, whether it looks there or has found enough; 1.2 to 1.9 us on an EPYC (Zen 4), where 3 in 4 rows look."""
_LEAST_ROWS, _MOST_ROWS = 512, 1024
_NUM_RESTED = 15
_FIRST = FIRST[1] + OTHERS * NUM_LENGTHS


class Asking:
    """What the others have brought, and how long they are not asked where that was not worth its time.

    To ask takes a row 1.5 us, and an accepted token saves what a token takes without drafts, a row's share of a pass.
    Where the others save less than they take, as far as the last 512 to 1,024 rows tell that asked, they are asked in
    one step of 16, until they bring more.

    Example: with 64 rows a step and 75 us a token, they are worth asking from one accepted token in 50 rows on. Where
    they bring nothing, 8 steps ask, which are 512 rows, then 15 do not, one does, 15 do not, and so on.

    Args:
        uses: bool [sources], which are asked otherwise.
        counts: float64 [3], gone on from and changed in place: rows that asked, tokens accepted that it brought them,
            and steps that are still not to ask.
    """

    def __init__(self, uses: BoolArray, counts: Float64Array) -> None:
        self._uses, self._counts = uses, counts
        self._uses_alone: BoolArray = uses & (np.arange(NUM_SOURCES) != OTHERS)
        self._asks = True

    def sources(self) -> BoolArray:
        """Which sources this step asks, bool [sources]; counts the step."""
        self._asks = bool(self._uses[OTHERS] and self._counts[2] == 0)
        if self._asks:
            return self._uses
        self._counts[2] = max(self._counts[2] - 1, 0)
        return self._uses_alone

    def note(self, num_rows: int, num_accepted: int, token_s: float) -> None:
        """What became of the latest step.

        Args:
            num_rows: of it.
            num_accepted: tokens accepted that came from others.
            token_s: what a token takes without drafts.
        """
        if not self._asks:
            return
        rows, accepted = self._counts[0] + num_rows, self._counts[1] + num_accepted
        share = 0.5 if rows >= _MOST_ROWS else 1.0
        self._counts[:2] = share * rows, share * accepted
        if rows >= _LEAST_ROWS and accepted * token_s < rows * _ASK_S:
            self._counts[2] = _NUM_RESTED


def num_from_others(features: NDArray[np.int32], was_accepted: NDArray[np.int8]) -> int:
    """Accepted tokens for which a place among others spoke most.

    Args:
        features: int32 [D or more, kinds], see `features`.
        was_accepted: int8 [D]: 1, 0, or -1 where it is not known.
    """
    return int(_count(features, was_accepted, _FIRST, _FIRST + NUM_LENGTHS))


@njit(cache=True, nogil=True)
def _count(features: NDArray[np.int32], was_accepted: NDArray[np.int8], first: int, behind: int) -> int:
    """Accepted tokens whose feature of the second kind lies between two numbers."""
    count = 0
    for i in range(was_accepted.size):
        count += was_accepted[i] == 1 and first <= features[i, 1] < behind
    return count
