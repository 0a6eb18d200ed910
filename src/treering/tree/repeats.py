"""Explain lost sharing: find where branches diverge although their later tokens agree.

A prefix tree shares a token only if everything before it is equal. After one token that differs (retokenized text, the
time of day in a system prompt, an edited context) everything is computed again. A repeat is a token that ends `GRAM`
tokens which an earlier branch outside its path has as well. The search is linear in tokens: rolling hashes along paths,
one hash table, and a comparison where a repeat begins.

    N tokens of all trees   R runs of repeats
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.once import compiled_once
from treering.tree.forest import Forest

GRAM = 16
"""Equal tokens in a row that make a repeat; shorter runs are chance or boilerplate."""

_BASE = np.int64(6364136223846793005)
# Odd 64-bit multiplier (2**64 / golden ratio), as a signed value so that numba stays in int64 arithmetic.
_MULTIPLIER = np.int64(-7046029254386353131)


class Repeats(NamedTuple):
    """Runs of repeats, each along one path or down a subtree, in packed order."""

    token: Int64Array  # [R] first token whose gram repeats
    other: Int64Array  # [R] the earlier token that it repeats
    num_tokens: Int64Array  # [R] tokens of the run below the fork of the two branches; each counts in one run
    fork: Int64Array  # [R] last token that the two branches share, -1 if they are in different trees
    child: Int64Array  # [R] token below the fork on the way to `token`; the root of its tree without a fork
    other_child: Int64Array  # [R] the same for `other`


class Trees(NamedTuple):
    """Arrays of `Forest` that paths need."""

    tokens: Int32Array
    parent: Int32Array
    position: Int32Array
    subtree_end: Int32Array
    segment_start: Int32Array
    segment_parent: Int32Array


@compiled_once(nogil=True)
def find_repeats(trees: Trees) -> Repeats:
    """Find all runs of repeats.

    Example: `[1, 2, *run]` and `[1, 3, *run]` with a run of 20 tokens give one run of 20 tokens; its fork is token 1.
    """
    num_tokens = trees.tokens.size
    match = _first_matches(trees)
    run_of = np.full(num_tokens, -1, np.int64)
    token, other = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    fork, child = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    other_child, count = np.empty(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    path = np.empty(trees.position.max() + 1, np.int64) if num_tokens else np.empty(0, np.int64)
    segment_of = _segment_of(trees)
    is_counted = np.zeros(num_tokens, np.bool_)
    num_runs = 0
    for t in range(num_tokens):
        path[trees.position[t]] = t
        if match[t] < 0:
            continue
        above = trees.parent[t]
        if above >= 0 and run_of[above] >= 0 and match[above] == trees.parent[match[t]]:
            run_of[t] = run_of[above]
            count[run_of[t]] += 1
            is_counted[t] = True
            continue
        branch, top, other_top = _fork(trees, segment_of, path, t, match[t])
        token[num_runs], other[num_runs], fork[num_runs] = t, match[t], branch
        child[num_runs], other_child[num_runs] = top, other_top
        count[num_runs] = _count(trees, is_counted, t, top)
        run_of[t] = num_runs
        num_runs += 1
    found = slice(0, num_runs)
    return Repeats(token[found], other[found], count[found], fork[found], child[found], other_child[found])


@compiled_once(nogil=True)
def _count(trees: Trees, is_counted: BoolArray, token: int, top: int) -> int:
    """Count the uncounted tokens of the gram at `token` that are at `top` or below."""
    count = 0
    for _ in range(min(GRAM, trees.position[token] - trees.position[top] + 1)):
        count += 0 if is_counted[token] else 1
        is_counted[token] = True
        token = trees.parent[token]
    return count


@compiled_once(nogil=True)
def _first_matches(trees: Trees) -> Int64Array:
    """Return the earlier token, not on the token's own path, that ends the same gram: [N], -1 for none."""
    num_tokens = trees.tokens.size
    match = np.full(num_tokens, -1, np.int64)
    grams = _gram_hashes(trees)
    size = 16
    while size < 2 * num_tokens:
        size *= 2
    table = np.full(size, -1, np.int32)
    for t in range(num_tokens):
        if trees.position[t] < GRAM - 1:
            continue
        above = trees.parent[t]
        # A repeat continues in the same branch if it can.
        if above >= 0 and match[above] >= 0:
            nearby = match[above] + 1
            if nearby < t and trees.parent[nearby] == match[above] and trees.tokens[nearby] == trees.tokens[t]:
                match[t] = nearby
        slot = ((grams[t] * _MULTIPLIER) >> 20) & (size - 1)
        while table[slot] >= 0 and grams[table[slot]] != grams[t]:
            slot = (slot + 1) & (size - 1)
        first = table[slot]
        if first < 0:
            table[slot] = t
        elif match[t] < 0 and trees.subtree_end[first] <= t and _same_gram(trees, first, t):
            match[t] = first
    return match


@compiled_once(nogil=True)
def _gram_hashes(trees: Trees) -> Int64Array:
    """Return the hash of the last GRAM tokens of the path that ends at each token, [N]; undefined on shorter paths."""
    num_tokens = trees.tokens.size
    prefix = np.empty(num_tokens, np.int64)
    grams = np.empty(num_tokens, np.int64)
    path = np.empty(trees.position.max() + 1, np.int64) if num_tokens else np.empty(0, np.int64)
    drop = np.int64(1)
    for _ in range(GRAM):
        drop *= _BASE
    for t in range(num_tokens):
        depth = trees.position[t]
        path[depth] = t
        before = prefix[trees.parent[t]] if depth > 0 else np.int64(0)
        prefix[t] = before * _BASE + trees.tokens[t] + 1
        grams[t] = prefix[t] - (prefix[path[depth - GRAM]] * drop if depth >= GRAM else np.int64(0))
    return grams


@compiled_once(nogil=True)
def _same_gram(trees: Trees, first: np.int64, second: np.int64) -> bool:
    for _ in range(GRAM):
        if trees.tokens[first] != trees.tokens[second]:
            return False
        first, second = trees.parent[first], trees.parent[second]
    return True


@compiled_once(nogil=True)
def _segment_of(trees: Trees) -> Int32Array:
    segment_of = np.empty(trees.tokens.size, np.int32)
    for segment in range(trees.segment_start.size):
        stop = trees.segment_start[segment + 1] if segment + 1 < trees.segment_start.size else trees.tokens.size
        segment_of[trees.segment_start[segment] : stop] = segment
    return segment_of


@compiled_once(nogil=True)
def _fork(
    trees: Trees, segment_of: Int32Array, path: Int64Array, token: np.int64, other: np.int64
) -> tuple[np.int64, np.int64, np.int64]:
    """Return the last common ancestor, and the token below it on the way to `token` and to `other`, an earlier one.

    `path` is that of `token`.
    """
    segment = segment_of[other]
    while trees.segment_parent[segment] >= 0:
        above = trees.segment_parent[segment]
        if trees.subtree_end[trees.segment_start[above]] > token:
            fork = np.int64(trees.parent[trees.segment_start[segment]])
            return fork, path[trees.position[fork] + 1], np.int64(trees.segment_start[segment])
        segment = above
    return np.int64(-1), path[0], np.int64(trees.segment_start[segment])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Position where two branches diverge, and the text that they share after it.

    Attributes:
        forest, other_forest: indices of the forests; equal for branches of one forest.
        branch, other_branch: indices among all branches: forests in order, then sequences.
        position: the first position at which the two differ.
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
        num_repeated_tokens: tokens that repeat another branch in runs of at least 16, and are computed again.
        num_forks: number of forks before such repeats.
        divergences: the costliest of these forks, most tokens first.
    """

    num_tokens: int
    num_repeated_tokens: int
    num_forks: int
    divergences: tuple[Fork, ...]

    @property
    def repeated_share(self) -> float:
        """Repeated over distinct tokens; 0.0 without tokens."""
        return self.num_repeated_tokens / self.num_tokens if self.num_tokens else 0.0


def explain_losses(forests: Sequence[Forest], limit: int = 20) -> Losses:
    """Find equal tokens of diverging branches, within forests and between them. Linear in distinct tokens.

    A token counts once, against the earliest branch that has the same 16 tokens; repeats of a branch's own path do not
    count.

    Example: `[1, 2, *run]` and `[1, 3, *run]` with a run of 20 tokens diverge at position 1 (3 and 2) and lose 20.
    """
    joined = Forest.concatenate(forests) if forests else Forest.from_sequences([])
    trees = Trees(*(getattr(joined, name) for name in Trees._fields))
    repeats = find_repeats(trees)
    tree_of = np.searchsorted(joined.tree_start, np.stack([repeats.token, repeats.other]), side="right") - 1
    # All runs between two trees have the same cause: the first difference of the trees.
    is_within = repeats.fork >= 0
    ours = np.where(is_within, repeats.child, joined.tree_start[tree_of[0]] if joined.num_trees else 0)
    theirs = np.where(is_within, repeats.other_child, joined.tree_start[tree_of[1]] if joined.num_trees else 0)
    pairs, pair_of = np.unique(np.stack([ours, theirs]), axis=1, return_inverse=True)
    pair_of = pair_of.reshape(-1)
    totals = np.bincount(pair_of, weights=repeats.num_tokens, minlength=pairs.shape[1]).astype(np.int64)
    # The run with the most tokens of each pair.
    longest = np.zeros(pairs.shape[1], np.int64)
    by_size = np.argsort(repeats.num_tokens, kind="stable")
    longest[pair_of[by_size]] = by_size
    costliest = np.argsort(-totals, kind="stable")[:limit]
    describe = _Describer(joined, forests, repeats)
    return Losses(
        num_tokens=joined.num_tokens,
        num_repeated_tokens=int(totals.sum()),
        num_forks=pairs.shape[1],
        divergences=tuple(describe(int(longest[i]), int(totals[i])) for i in costliest),
    )


class _Describer:
    def __init__(self, joined: Forest, forests: Sequence[Forest], repeats: Repeats) -> None:
        self._joined = joined
        self._repeats = repeats
        self._token_stops = np.cumsum([forest.num_tokens for forest in forests])
        self._by_end = np.argsort(joined.branch_end, kind="stable")
        self._ends = joined.branch_end[self._by_end]

    def __call__(self, run: int, num_tokens: int) -> Fork:
        token, other = int(self._repeats.token[run]), int(self._repeats.other[run])
        position, child, other_child = self._first_difference(run)
        return Fork(
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
        """Return the first branch in packed order through the token: its end is the first at or after the token."""
        return int(self._by_end[np.searchsorted(self._ends, token)])

    def _first_difference(self, run: int) -> tuple[int, int | None, int | None]:
        """Return the position, and the packed indices of the two tokens there."""
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
