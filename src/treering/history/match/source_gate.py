"""Where a step looks: in all sources, and not in those that take longer than they save.

To look among others (what runs in other groups, and the history of other prompts) and in history behind an edit costs a
search for every row that has found too little. Knows rows, and tokens that were accepted from there. Knows nothing of
how places are found, and reads no clock.

    B rows   D drafted tokens   looks: the sources, and EDITS behind them
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.history.features import EDITS, FIRST, HISTORY, NUM_LENGTH_CLASSES, NUM_LENGTHS, OTHERS

ASKED = (OTHERS, EDITS)
"""Where it depends whether a step looks."""
_ASK_S = (1.5e-6, 0.125e-6)
"""Of a row, whether it looks there or has found enough; 1.2 to 1.9 us and 0.4 to 0.6 us on an EPYC (Zen 4), where 3 in
4 rows look. Of the second only a quarter: places behind edits also speak for what others found, which is not counted.
"""
_LEAST_ROWS = (512, 2048)
"""A place behind an edit brings many tokens at once, or none: fewer rows would not tell."""
_NUM_RESTED = 15


class SourceGate:
    """Whether one place is asked: what it has brought, and how long it is not asked where that was not worth its time.

    To ask takes a row `ask_s`, and an accepted token saves what a token takes without drafts, a row's share of a pass.
    Where what is brought saves less than asking takes, as far as the last rows tell that asked, one step in 16 asks,
    until it brings more.

    Example: with 1.5 us a row and 75 us a token it is worth asking from one accepted token in 50 rows on. Where nothing
    is brought, with 512 rows to tell and 64 a step, 8 steps ask, then 15 do not, one does, 15 do not, and so on.

    Args:
        ask_s: seconds that a row takes to ask.
        least_rows: rows that tell; at most twice as many are remembered.
        counts: float64 [3], gone on from and changed in place: rows that asked, tokens accepted that it brought them,
            and steps that are still not to ask.
    """

    def __init__(self, ask_s: float, least_rows: int, counts: Float64Array) -> None:
        self._ask_s, self._least_rows, self._counts = ask_s, least_rows, counts
        self._asks = False

    def is_due(self) -> bool:
        """Whether this step asks; counts the step."""
        num_left = self._counts[2]
        self._asks = bool(num_left == 0)
        self._counts[2] = max(num_left - 1, 0)
        return self._asks

    def note(self, num_rows: int, num_accepted: int, token_s: float) -> None:
        """What became of the latest step.

        Args:
            num_rows: of it.
            num_accepted: tokens accepted that were found there.
            token_s: what a token takes without drafts.
        """
        if not self._asks:
            return
        rows, accepted = self._counts[0] + num_rows, self._counts[1] + num_accepted
        share = 0.5 if rows >= 2 * self._least_rows else 1.0
        self._counts[:2] = share * rows, share * accepted
        if rows >= self._least_rows and accepted * token_s < rows * self._ask_s:
            self._counts[2] = _NUM_RESTED


class EnabledSources:
    """Where the steps of a drafter look.

    Args:
        uses: bool [sources], which may be looked at.
        counts: float64 [2, 3], for each of `ASKED` those of its `SourceGate`.

    Example: with history alone, the others are never asked, and history behind edits as long as that pays.
    """

    def __init__(self, uses: BoolArray, counts: Float64Array) -> None:
        self._uses: BoolArray = np.append(uses, uses[HISTORY])
        self._askings = [
            (place, SourceGate(*about)) for place, *about in zip(ASKED, _ASK_S, _LEAST_ROWS, counts, strict=True)
        ]

    def due(self) -> BoolArray:
        """Where this step looks, bool [looks]; counts the step."""
        due = self._uses.copy()
        for place, asking in self._askings:
            due[place] = due[place] and asking.is_due()
        return due

    def note(
        self,
        offsets: Int64Array,
        parents: Int32Array,
        features: Int32Array,
        was_accepted: NDArray[np.int8],
        token_s: float,
    ) -> None:
        """What became of the latest step's drafts.

        Args:
            offsets: int64 [B + 1], of the rows' drafts.
            parents: int32 [D], within the row.
            features: int32 [D or more, kinds], see `features`.
            was_accepted: int8 [D]: 1, 0, or -1 where it is not known.
            token_s: what a token takes without drafts.
        """
        num_rows, *brought = num_brought(offsets, parents, features, was_accepted)
        for (_, asking), num_accepted in zip(self._askings, brought, strict=True):
            asking.note(num_rows, num_accepted, token_s)


def num_brought(
    offsets: Int64Array, parents: Int32Array, features: Int32Array, was_accepted: NDArray[np.int8]
) -> tuple[int, int, int]:
    """How many rows tell, and how many accepted tokens each of `ASKED` has brought them; see `EnabledSources.note`.

    A row tells nothing where it is not known of any of its drafted tokens whether it was right.

    Of others, those for which a place of theirs spoke most; of history behind edits, all of a row's where its first
    token was one that no match spoke for, but a place behind an edit.
    """
    first = FIRST[1] + OTHERS * NUM_LENGTHS
    counts: tuple[int, int, int] = _count(
        offsets, parents, features, was_accepted, first, first + NUM_LENGTHS, FIRST[2], NUM_LENGTH_CLASSES
    )
    return counts


@njit(cache=True, nogil=True)
def _count(
    offsets: Int64Array, parents: Int32Array, features: Int32Array, was_accepted: NDArray[np.int8],
    first_of_others: int, behind_others: int, first_edit: int, num_classes: int,
) -> tuple[int, int, int]:  # fmt: skip
    num_rows = from_others = behind_edits = 0
    for b in range(offsets.size - 1):
        num_accepted, is_edited, is_known = 0, False, offsets[b + 1] == offsets[b]
        for i in range(offsets[b], offsets[b + 1]):
            is_known |= was_accepted[i] >= 0
            if was_accepted[i] != 1:
                continue
            num_accepted += 1
            from_others += first_of_others <= features[i, 1] < behind_others
            # Classes of lengths run within those of edits, and the first of either is 0.
            edit, length = divmod(features[i, 2] - first_edit, num_classes)
            is_edited |= parents[i] < 0 and length == 0 and edit > 0
        num_rows += is_known
        behind_edits += num_accepted if is_edited else 0
    return num_rows, from_others, behind_edits
