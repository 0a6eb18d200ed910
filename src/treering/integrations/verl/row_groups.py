"""Assign the rows of a batch to ranks and micro-batches, keeping rows of a prompt together.

Groups stay whole where they fit. Ranks get the same number of rows; micro-batches have a budget of distinct tokens.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from treering.arrays import Int64Array
from treering.errors import InputError
from treering.tree.forest import Forest


def share_rows(forest: Forest, groups: Sequence[Hashable], num_ranks: int) -> Int64Array:
    """Return the rank of each row, chosen so that the busiest rank computes few distinct tokens.

    verl deals rows in order, an equal share to each rank. Here groups go whole to the rank with the fewest tokens so
    far, the largest group first; a group is split only if no rank has room for it. If that would not reduce the tokens
    of the busiest rank, all rows stay.

    Args:
        forest: of the B rows of all ranks.
        groups: group of each row, such as its prompt.
        num_ranks: a divisor of B; each rank gets B / num_ranks rows.

    Returns:
        int64 [B], from 0 to num_ranks - 1.

    Raises:
        InputError: num_ranks does not divide B.

    Example: rows [1, 2], [5, 6], [1, 3], [5, 7] with groups a, b, a, b on two ranks get the ranks 0, 1, 0, 1.
    """
    num_rows = forest.num_branches
    if num_rows % num_ranks:
        raise InputError(f"{num_rows} rows cannot be divided equally among {num_ranks} ranks; give a multiple")
    dealt = dealt_rows(num_rows, num_ranks)
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    shares = _Shares(forest, num_ranks)
    prices = {group: shares.num_tokens(rows) for group, rows in members.items()}
    for group in sorted(members, key=lambda group: -prices[group]):
        shares.add(members[group])
    is_less = max(shares.tokens_by_rank(shares.rank_of_row)) < max(shares.tokens_by_rank(dealt))
    return shares.rank_of_row if is_less else dealt


def dealt_rows(num_rows: int, num_ranks: int) -> Int64Array:
    """Return the rank of each row as verl deals them. Example: 4 rows on 2 ranks are [0, 0, 1, 1]."""
    return np.repeat(np.arange(num_ranks), num_rows // num_ranks)


def order_rows(groups: Sequence[Hashable], num_ranks: int, num_mini_batches: int) -> Int64Array:
    """Return the rows of each rank, one mini-batch after another, so that mini-batches hold whole groups.

    Rows come as verl deals them; each rank's rows are in the order in which they finished. Groups follow the order in
    which their last rows finished; a group is split only where a mini-batch ends within it. `share_rows` then decides
    which rank computes which rows of a mini-batch.

    Args:
        groups: group of each of the B rows of all ranks, such as its prompt.
        num_ranks: number of ranks; each gets B / num_ranks rows, the same number in each mini-batch.
        num_mini_batches: number of mini-batches.

    Returns:
        int64 [num_ranks, B / num_ranks]: each row once.

    Raises:
        InputError: B is not a multiple of num_ranks * num_mini_batches.

    Example: of groups a, b, a, b on two ranks in two mini-batches rank 0 has rows 0 and 1, and rank 1 has 2 and 3:
    first the rows of a, then those of b.
    """
    num_rows, num_parts = len(groups), num_ranks * num_mini_batches
    if num_rows % num_parts:
        raise InputError(
            f"{num_rows} rows cannot be divided equally among {num_mini_batches} mini-batches of {num_ranks} ranks; "
            f"give a multiple of {num_parts}"
        )
    # The last position of each group's rows on any rank: later rows overwrite earlier ones.
    positions = np.arange(num_rows) % (num_rows // num_ranks)
    last = {groups[row]: (int(positions[row]), row) for row in np.argsort(positions, kind="stable")}
    order = np.array(sorted(range(num_rows), key=lambda row: last[groups[row]]))
    return order.reshape(num_mini_batches, num_ranks, -1).transpose(1, 0, 2).reshape(num_ranks, -1)


class _Shares:
    """Rows of each rank so far."""

    def __init__(self, forest: Forest, num_ranks: int) -> None:
        self._paths, self._offsets = forest.paths()
        self._last_number = np.empty(forest.num_tokens, np.int64)
        self._loads = np.zeros(num_ranks, np.int64)
        self._room = np.full(num_ranks, forest.num_branches // num_ranks)
        self.rank_of_row = np.full(forest.num_branches, -1, np.int64)

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of distinct tokens of some rows."""
        paths = [self._paths[self._offsets[row] : self._offsets[row + 1]] for row in rows]
        tokens = np.concatenate(paths)
        numbers = np.arange(tokens.size)
        # Each token keeps one number, whatever else is in the array; sorting millions would take seconds.
        self._last_number[tokens] = numbers
        return int((self._last_number[tokens] == numbers).sum())

    def tokens_by_rank(self, rank_of_row: Int64Array) -> list[int]:
        """Return the distinct tokens of each rank."""
        return [self.num_tokens(np.flatnonzero(rank_of_row == rank).tolist()) for rank in range(self._loads.size)]

    def add(self, rows: list[int]) -> None:
        """Give a group to the least busy rank with room; if none has room, split it, starting with the most room."""
        while rows:
            fits = np.flatnonzero(self._room >= len(rows))
            rank = fits[self._loads[fits].argmin()] if fits.size else self._room.argmax()
            now, rows = rows[: self._room[rank]], rows[self._room[rank] :]
            self.rank_of_row[now] = rank
            self._room[rank] -= len(now)
            self._loads[rank] += self.num_tokens(now)


def plan_rows(
    forest: Forest, groups: Sequence[Hashable], *, max_tokens: int | None = None, max_rows: int | None = None
) -> list[list[int]]:
    """Return the rows of each micro-batch, adding groups in the order of their first rows until one does not fit.

    A group is split only if it is larger than a micro-batch.

    Args:
        forest: of the B rows.
        groups: group of each row, such as its prompt.
        max_tokens: most distinct tokens of a micro-batch.
        max_rows: most rows of a micro-batch.

    Raises:
        InputError: a row is longer than `max_tokens`.

    Example: rows [1, 2, 3], [9, 9], [1, 2, 4] with groups a, b, a and `max_tokens=4` are [[0, 2], [1]].
    """
    longest = int(forest.branch_length.max(initial=0))
    if max_tokens is not None and longest > max_tokens:
        raise InputError(
            f"a row has {longest} tokens, but a micro-batch holds {max_tokens}: raise verl's ppo_max_token_len_per_gpu "
            "and log_prob_max_token_len_per_gpu to the longest prompt and response together"
        )
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    bins = _Bins(forest, max_tokens, max_rows)
    for rows in members.values():
        bins.add(rows)
    return bins.filled


def split_rows(micro_batches: Sequence[Sequence[int]], num_wanted: int) -> list[list[int]]:
    """Split the micro-batches with most rows until there are `num_wanted`, the number that every rank must run.

    Raises:
        InputError: there are fewer rows than micro-batches.

    Example: `split_rows([[0, 1, 2], [3]], 3)` is [[0], [1, 2], [3]].
    """
    split = [list(rows) for rows in micro_batches]
    num_rows = sum(map(len, split))
    if num_rows < num_wanted:
        raise InputError(
            f"another rank runs {num_wanted} micro-batches, but this one has {num_rows} rows: give all ranks the same "
            "number of rows, as verl's own dispatch does"
        )
    while len(split) < num_wanted:
        at = max(range(len(split)), key=lambda i: len(split[i]))
        middle = len(split[at]) // 2
        split[at : at + 1] = [split[at][:middle], split[at][middle:]]
    return split


class _Bins:
    """Micro-batches, filled one after another."""

    def __init__(self, forest: Forest, max_tokens: int | None, max_rows: int | None) -> None:
        self._paths, self._offsets = forest.paths()
        self._max_tokens = forest.num_tokens if max_tokens is None else max_tokens
        self._max_rows = forest.num_branches if max_rows is None else max_rows
        self._is_held = np.zeros(forest.num_tokens, bool)
        self._num_tokens = 0
        self.filled: list[list[int]] = []

    def add(self, rows: Sequence[int]) -> None:
        """Add a group to the last micro-batch, else to a new one, else row by row."""
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
        """Return the packed indices of distinct tokens of some rows that the open micro-batch does not hold."""
        paths = [self._paths[self._offsets[row] : self._offsets[row + 1]] for row in rows]
        tokens = np.unique(np.concatenate(paths)).astype(np.int64)
        return tokens[~self._is_held[tokens]]
