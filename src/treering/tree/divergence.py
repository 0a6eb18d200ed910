"""Why sharing was lost: where branches diverge although their later tokens agree.

A prefix tree shares a token only if everything before it is equal. One token that differs (retokenized text, the time
of day in a system prompt, an edited context), and everything after it is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.tree.forest import Forest
from treering.tree.repeats import Repeats, Trees, find_repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A position where two branches diverge, and the text that they share after it.

    Attributes:
        forest, other_forest: numbers of the forests; equal for branches of one forest.
        branch, other_branch: numbers among all branches: forests in order, then sequences.
        position: the first one where the two differ.
        token, other_token: the tokens there; None for a branch that has ended.
        num_tokens: tokens of this branch that repeat the other and are computed again; between forests, also those
            before the position.
        shift: how many positions later they are on this side, in the longest run; 0 is a replacement of equal length.
    """

    forest: int
    other_forest: int
    branch: int
    other_branch: int
    position: int
    token: int | None
    other_token: int | None
    num_tokens: int
    shift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Tokens that sharing by prefix does not share.

    Attributes:
        num_tokens: distinct tokens.
        num_repeated_tokens: those that repeat another branch in runs of at least 16, and are computed again.
        num_forks: number of places where branches diverge before such repeats.
        divergences: the costliest of them, most tokens first.
    """

    num_tokens: int
    num_repeated_tokens: int
    num_forks: int
    divergences: tuple[Divergence, ...]

    @property
    def repeated_share(self) -> float:
        """Repeated over distinct tokens; 0.0 without tokens."""
        return self.num_repeated_tokens / self.num_tokens if self.num_tokens else 0.0


def explain_losses(forests: Sequence[Forest], limit: int = 20) -> Losses:
    """Finds equal tokens of diverging branches, within forests and between them. Linear in distinct tokens.

    A token counts once, against the earliest branch that has the same 16 tokens; repeats of a branch's own path do not
    count.

    Example: `[1, 2, *run]` and `[1, 3, *run]` with a run of 20 tokens diverge at position 1 (3 and 2) and lose 20.
    """
    joined = Forest.concatenate(forests) if forests else Forest.from_sequences([])
    trees = Trees(*(getattr(joined, name) for name in Trees._fields))
    repeats = find_repeats(trees)
    tree_of = np.searchsorted(joined.tree_start, np.stack([repeats.token, repeats.other]), side="right") - 1
    # All runs between two trees have one cause: the first difference of the trees.
    is_within = repeats.fork >= 0
    ours = np.where(is_within, repeats.child, joined.tree_start[tree_of[0]] if joined.num_trees else 0)
    theirs = np.where(is_within, repeats.other_child, joined.tree_start[tree_of[1]] if joined.num_trees else 0)
    pairs, pair_of = np.unique(np.stack([ours, theirs]), axis=1, return_inverse=True)
    pair_of = pair_of.reshape(-1)
    totals = np.bincount(pair_of, weights=repeats.num_tokens, minlength=pairs.shape[1]).astype(np.int64)
    longest = _longest_runs(repeats, pair_of, pairs.shape[1])
    costliest = np.argsort(-totals, kind="stable")[:limit]
    describe = _Describer(joined, forests, repeats)
    return Losses(
        num_tokens=joined.num_tokens,
        num_repeated_tokens=int(totals.sum()),
        num_forks=pairs.shape[1],
        divergences=tuple(describe(int(longest[i]), int(totals[i])) for i in costliest),
    )


def _longest_runs(repeats: Repeats, pair_of: Int64Array, num_pairs: int) -> Int64Array:
    """The run with the most tokens of each pair."""
    longest = np.zeros(num_pairs, np.int64)
    by_size = np.argsort(repeats.num_tokens, kind="stable")
    longest[pair_of[by_size]] = by_size
    return longest


class _Describer:
    """Turns a run of repeats into a `Divergence`."""

    def __init__(self, joined: Forest, forests: Sequence[Forest], repeats: Repeats) -> None:
        self._joined = joined
        self._repeats = repeats
        self._token_stops = np.cumsum([forest.num_tokens for forest in forests])
        self._by_end = np.argsort(joined.branch_end, kind="stable")
        self._ends = joined.branch_end[self._by_end]

    def __call__(self, run: int, num_tokens: int) -> Divergence:
        token, other = int(self._repeats.token[run]), int(self._repeats.other[run])
        position, child, other_child = self._first_difference(run)
        return Divergence(
            forest=int(np.searchsorted(self._token_stops, token, side="right")),
            other_forest=int(np.searchsorted(self._token_stops, other, side="right")),
            branch=self._branch_through(token),
            other_branch=self._branch_through(other),
            position=position,
            token=None if child is None else int(self._joined.tokens[child]),
            other_token=None if other_child is None else int(self._joined.tokens[other_child]),
            num_tokens=num_tokens,
            shift=int(self._joined.position[token]) - int(self._joined.position[other]),
        )

    def _branch_through(self, token: int) -> int:
        """The first branch in packed order that contains the token: its end is the first at or after the token."""
        return int(self._by_end[np.searchsorted(self._ends, token)])

    def _first_difference(self, run: int) -> tuple[int, int | None, int | None]:
        """The position, and the two tokens there by packed index."""
        if self._repeats.fork[run] >= 0:
            child, other_child = int(self._repeats.child[run]), int(self._repeats.other_child[run])
            return int(self._joined.position[child]), child, other_child
        branches = [self._branch_through(int(side[run])) for side in (self._repeats.token, self._repeats.other)]
        ours, theirs = (self._joined.path(branch) for branch in branches)
        common = min(ours.size, theirs.size)
        differs = np.flatnonzero(self._joined.tokens[ours[:common]] != self._joined.tokens[theirs[:common]])
        at = int(differs[0]) if differs.size else common
        return at, _item(ours, at), _item(theirs, at)


def _item(path: Int32Array, at: int) -> int | None:
    return int(path[at]) if at < path.size else None
