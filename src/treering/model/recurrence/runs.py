"""Cut a forest into runs: pieces between which a recurrent layer can be stopped and restarted.

A state can only be read where a row of a call ends. So runs end at forks and where partitions below need the state, and
are otherwise as long as possible.

    N tokens   S runs
"""

from dataclasses import dataclass

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrenceRuns:
    """The runs of a forest in packed order.

    Attributes:
        first: int64 [S + 1] first token of each run, then N.
        parent: int64 [S] the parent run, -1 for none.
        start: int64 [S] index of the state from the partition above that it starts from, -1 for none.
        num_children: int64 [S].
        is_left: bool [S] whether a partition below needs the state after its last token.
    """

    first: Int64Array
    parent: Int64Array
    start: Int64Array
    num_children: Int64Array
    is_left: BoolArray

    @property
    def length(self) -> Int64Array:
        """[S] number of tokens of each run."""
        return np.diff(self.first)

    @property
    def num_runs(self) -> int:
        """S."""
        return self.parent.size


def find_runs(parent: Int32Array, start: Int64Array, left: Int64Array) -> RecurrenceRuns:
    """Cuts a forest into runs.

    Args:
        parent: int32 [N] of the forest.
        start: int64 [N] index of the state from above that a token starts from, -1 for none.
        left: int64, ascending: tokens whose state partitions below need.

    Example: of the branches 5, 6, 7 and 5, 6, 8 the runs are [5, 6], [7] and [8]; if the state of token 0 is needed
    below there are four: [5], [6], [7] and [8].
    """
    num_tokens = parent.size
    num_children = np.bincount(parent[parent >= 0], minlength=num_tokens)
    is_last = num_children != 1
    is_last[left] = True
    is_first = (parent != np.arange(-1, num_tokens - 1)) | (parent < 0)
    is_first[1:] |= is_last[:-1]
    first = np.flatnonzero(is_first)
    run_of = np.cumsum(is_first) - 1
    above = parent[first].astype(np.int64)
    last = np.append(first[1:], num_tokens) - 1
    needed = np.zeros(num_tokens, bool)
    needed[left] = True
    return RecurrenceRuns(
        first=np.append(first, num_tokens),
        parent=np.where(above < 0, -1, run_of[above]),
        start=start[first],
        num_children=num_children[last],
        is_left=needed[last],
    )
