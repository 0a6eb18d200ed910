"""Which sources a step searches: all that are enabled, except other prompts if they save less time than they cost.

B rows   D drafted tokens
"""

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.history.features import FIRST, NUM_LENGTHS, OTHERS
from treering.lean import kernel

_QUERY_S = 1.5e-6
"""Seconds that searching other prompts costs per row, whether the row needs it or not: 1.2 to 1.9 us on an EPYC (Zen 4)
where 3 in 4 rows search."""
_MIN_ROWS = 512
_NUM_SKIPPED = 15


class SourceGate:
    """Decides whether to search a source this step: other prompts, unless another price is given.

    Searching other prompts costs each row 1.5 us. An accepted token saves what a token takes without drafts, a row's
    share of a pass. If the accepted tokens that the source produced over recent rows save less than its searches cost,
    only one step in 16 searches it, until it produces more.

    Example: at 75 us a token, searching pays from one accepted token in 50 rows on. If nothing is accepted and a step
    has 64 rows, 8 steps search, then 15 do not, one does, 15 do not, and so on.

    Args:
        counts: float64 [3], changed in place: rows searched, accepted tokens that the source produced, and steps that
            are still to be skipped.
        price_s: seconds that a search costs a row.
    """

    def __init__(self, counts: Float64Array, price_s: float = _QUERY_S) -> None:
        self._counts, self._price_s = counts, price_s
        self._is_searched = False

    def is_due(self) -> bool:
        """Whether this step searches the source; counts the step."""
        num_left = self._counts[2]
        self._is_searched = bool(num_left == 0)
        self._counts[2] = max(num_left - 1, 0)
        return self._is_searched

    def note(self, num_rows: int, num_accepted: int, token_s: float) -> None:
        """Takes the outcome of the latest step.

        Args:
            num_rows: rows of the step.
            num_accepted: accepted tokens that the source produced.
            token_s: seconds that a token takes without drafts.
        """
        if not self._is_searched:
            return
        rows, accepted = self._counts[0] + num_rows, self._counts[1] + num_accepted
        share = 0.5 if rows >= 2 * _MIN_ROWS else 1.0
        self._counts[:2] = share * rows, share * accepted
        if rows >= _MIN_ROWS and accepted * token_s < rows * self._price_s:
            self._counts[2] = _NUM_SKIPPED


class EnabledSources:
    """The sources that each step of a drafter searches.

    Args:
        is_enabled: bool [sources], which may be searched at all.
        counts: float64 [3], those of the `SourceGate` of other prompts.

    Example: with history alone, other prompts are never searched.
    """

    def __init__(self, is_enabled: BoolArray, counts: Float64Array) -> None:
        self._is_enabled = is_enabled
        self._gate = SourceGate(counts)

    def due(self) -> BoolArray:
        """The sources that this step searches, bool [sources]; counts the step."""
        due = self._is_enabled.copy()
        due[OTHERS] = due[OTHERS] and self._gate.is_due()
        return due

    def note(self, offsets: Int64Array, features: Int32Array, was_accepted: NDArray[np.int8], token_s: float) -> None:
        """Takes the outcome of the latest step's drafts.

        Args:
            offsets: int64 [B + 1], of the rows' drafts.
            features: int32 [D or more, kinds], see `features`.
            was_accepted: int8 [D]: 1, 0, or -1 if unknown.
            token_s: seconds that a token takes without drafts.
        """
        self._gate.note(*count_from_others(offsets, features, was_accepted), token_s)


def count_from_others(offsets: Int64Array, features: Int32Array, was_accepted: NDArray[np.int8]) -> tuple[int, int]:
    """How many rows have a known outcome, and how many accepted tokens had their strongest match in other prompts."""
    first = FIRST[1] + OTHERS * NUM_LENGTHS
    counts: tuple[int, int] = _count(offsets, features, was_accepted, first, first + NUM_LENGTHS)
    return counts


@kernel
def _count(
    offsets: Int64Array, features: Int32Array, was_accepted: NDArray[np.int8], first: int, end: int
) -> tuple[int, int]:
    num_rows = num_accepted = 0
    for b in range(offsets.size - 1):
        is_known = offsets[b + 1] == offsets[b]
        for i in range(offsets[b], offsets[b + 1]):
            is_known |= was_accepted[i] >= 0
            num_accepted += was_accepted[i] == 1 and first <= features[i, 1] < end
        num_rows += is_known
    return num_rows, num_accepted
