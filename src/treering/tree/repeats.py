"""Finds tokens of one branch that another branch has too, where no shared prefix can hold them.

A repeat is a token that ends `GRAM` tokens which an earlier branch outside its path has as well. Linear in tokens:
rolling hashes along paths, one hash table, and a comparison where a repeat begins.

    N tokens of all trees   R runs of repeats
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.once import compiled_once

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
    """The fields of `Forest` that paths need."""

    tokens: Int32Array
    parent: Int32Array
    position: Int32Array
    subtree_end: Int32Array
    segment_start: Int32Array
    segment_parent: Int32Array


@compiled_once(nogil=True)
def find_repeats(trees: Trees) -> Repeats:
    """All runs of repeats.

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
    """Counts the uncounted tokens of the gram at `token` that are at `top` or below."""
    count = 0
    for _ in range(min(GRAM, trees.position[token] - trees.position[top] + 1)):
        count += 0 if is_counted[token] else 1
        is_counted[token] = True
        token = trees.parent[token]
    return count


@compiled_once(nogil=True)
def _first_matches(trees: Trees) -> Int64Array:
    """[N] the earlier token, not on the token's own path, that ends the same gram; -1 for none."""
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
    """[N] hash of the last GRAM tokens of the path that ends at each token; undefined on shorter paths."""
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
    """Last common ancestor, and the token below it on either side. `path` is that of `token`; `other` is earlier."""
    segment = segment_of[other]
    while trees.segment_parent[segment] >= 0:
        above = trees.segment_parent[segment]
        if trees.subtree_end[trees.segment_start[above]] > token:
            fork = np.int64(trees.parent[trees.segment_start[segment]])
            return fork, path[trees.position[fork] + 1], np.int64(trees.segment_start[segment])
        segment = above
    return np.int64(-1), path[0], np.int64(trees.segment_start[segment])
