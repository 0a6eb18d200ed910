"""Which rows of a batch stand together in a micro-batch: rows of a prompt, within a budget of distinct tokens."""

from collections.abc import Hashable, Sequence

import numpy as np

from treering.arrays import Int64Array
from treering.errors import InputError
from treering.tree.forest import Forest


def plan_rows(
    forest: Forest, groups: Sequence[Hashable], *, max_tokens: int | None = None, max_rows: int | None = None
) -> list[list[int]]:
    """Rows of each micro-batch: groups in the order of their first rows, a new micro-batch where the next does not fit.

    A group is split only if it is larger than a micro-batch.

    Args:
        forest: of the B rows.
        groups: of each row, such as its prompt.
        max_tokens: most distinct tokens of a micro-batch.
        max_rows: most rows of a micro-batch.

    Raises:
        InputError: a row longer than `max_tokens`.

    Example: rows [1, 2, 3], [9, 9], [1, 2, 4] with groups a, b, a and `max_tokens=4` are [[0, 2], [1]].
    """
    longest = int(forest.branch_length.max(initial=0))
    if max_tokens is not None and longest > max_tokens:
        raise InputError(
            f"a micro-batch holds {max_tokens} tokens, and a row has {longest}: raise verl's "
            "ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu to the longest prompt and response together"
        )
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    bins = _Bins(forest, max_tokens, max_rows)
    for rows in members.values():
        bins.add(rows)
    return bins.filled


def split_rows(micro_batches: Sequence[Sequence[int]], num_wanted: int) -> list[list[int]]:
    """Splits the micro-batches with most rows until there are `num_wanted`, because all ranks run equally many.

    Raises:
        InputError: fewer rows than micro-batches.

    Example: `split_rows([[0, 1, 2], [3]], 3)` is [[0], [1, 2], [3]].
    """
    split = [list(rows) for rows in micro_batches]
    num_rows = sum(map(len, split))
    if num_rows < num_wanted:
        raise InputError(
            f"another rank runs {num_wanted} micro-batches, and this one has {num_rows} rows: give all ranks equally "
            "many rows, as verl's own dispatch does"
        )
    while len(split) < num_wanted:
        at = max(range(len(split)), key=lambda i: len(split[i]))
        middle = len(split[at]) // 2
        split[at : at + 1] = [split[at][:middle], split[at][middle:]]
    return split


class _Bins:
    """Micro-batches that are filled one after another."""

    def __init__(self, forest: Forest, max_tokens: int | None, max_rows: int | None) -> None:
        self._paths, self._offsets = forest.paths()
        self._max_tokens = forest.num_tokens if max_tokens is None else max_tokens
        self._max_rows = forest.num_branches if max_rows is None else max_rows
        self._is_held = np.zeros(forest.num_tokens, bool)
        self._num_tokens = 0
        self.filled: list[list[int]] = []

    def add(self, rows: Sequence[int]) -> None:
        """Adds a group to the last micro-batch, else to a new one, else row by row."""
        if self._fits(rows) or self._opened()._fits(rows):
            self._put(rows)
        else:
            for row in rows:
                if not self._fits([row]):
                    self._opened()
                self._put([row])

    def _opened(self) -> "_Bins":
        self._is_held[:] = False
        self._num_tokens = 0
        self.filled.append([])
        return self

    def _fits(self, rows: Sequence[int]) -> bool:
        if not self.filled:
            return False
        new = self._new_tokens(rows)
        return self._num_tokens + new.size <= self._max_tokens and len(self.filled[-1]) + len(rows) <= self._max_rows

    def _put(self, rows: Sequence[int]) -> None:
        new = self._new_tokens(rows)
        self._is_held[new] = True
        self._num_tokens += new.size
        self.filled[-1].extend(rows)

    def _new_tokens(self, rows: Sequence[int]) -> Int64Array:
        """The distinct tokens of some rows that the open micro-batch does not hold: packed indices."""
        paths = [self._paths[self._offsets[row] : self._offsets[row + 1]] for row in rows]
        tokens = np.unique(np.concatenate(paths)).astype(np.int64)
        return tokens[~self._is_held[tokens]]
