"""Turn sequences into prefix trees: one radix-tree insertion per sequence, then one depth-first walk.

Insertion compares whole runs of tokens and looks up the child table only where a run ends: one comparison per flat
token plus one look-up per segment that a sequence passes. Compiled functions allocate and sort nothing, because numba
takes seconds to compile what numpy has ready.

    F flat tokens   K sequences   M nodes of the radix tree (at most 2K)   N distinct tokens
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean

# Odd 64-bit multiplier (2**64 / golden ratio), as a signed value so that numba stays in int64 arithmetic.
_MULTIPLIER = np.int64(-7046029254386353131)


class RadixTree(NamedTuple):
    """Nodes in order of creation: the run `flat[start:start + length]`, the parent (-1 at a root), the child table."""

    start: Int64Array  # [M]
    length: Int64Array  # [M]
    parent: Int64Array  # [M]
    seen: Int64Array  # [M] ascending in the order of first appearance among siblings
    table_keys: Int64Array
    table_nodes: Int64Array


class ForestArrays(NamedTuple):
    """Arrays of a `Forest` in depth-first pre-order, under the same names."""

    tokens: Int32Array  # [N]
    parent: Int32Array  # [N]
    position: Int32Array  # [N]
    subtree_end: Int32Array  # [N]
    segment_start: Int32Array  # [M]
    segment_parent: Int32Array  # [M]
    branch_end: Int32Array  # [K]


class RadixTreeBuilder:
    """Builder that inserts sequences into one radix tree, a few at a time.

    Example: see `insert_sequences`, which inserts all at once.
    """

    def __init__(self, flat: Int32Array, offsets: Int64Array) -> None:
        """Sequence i is `flat[offsets[i]:offsets[i + 1]]`; none is inserted yet."""
        capacity = 2 * (offsets.size - 1)
        self._flat, self._offsets = flat, offsets
        self._nodes = np.empty((4, capacity), np.int64)
        self._table = np.full((2, max(16, 1 << (2 * capacity - 1).bit_length())), -1, np.int64)
        self._is_leaf = np.ones(capacity, np.bool_)
        self._num_inserted = self._num_nodes = 0

    def insert(self, stop: int) -> None:
        """Insert the next sequences, in order, up to index `stop`."""
        self._num_nodes = _insert(
            self._flat, self._offsets, self._num_inserted, stop, *self._nodes, self._is_leaf, *self._table,
            self._num_nodes,
        )  # fmt: skip
        self._num_inserted = stop

    def tree(self) -> RadixTree:
        """Return the tree of all inserted sequences."""
        return RadixTree(*self._nodes[:, : self._num_nodes], *self._table)


def insert_sequences(flat: Int32Array, offsets: Int64Array) -> RadixTree:
    """Insert `flat[offsets[i]:offsets[i + 1]]` for every i, in order, into one radix tree."""
    builder = RadixTreeBuilder(flat, offsets)
    builder.insert(offsets.size - 1)
    return builder.tree()


def count_work(tree: RadixTree) -> tuple[int, int]:
    """Count the distinct tokens and attention pairs of a radix tree's forest, without building the forest."""
    ends, above = tree.length.copy(), tree.parent.copy()
    # Each round doubles the number of segments above that are added.
    while (above != -1).any():
        has_more = above != -1
        ends[has_more] += ends[above[has_more]]
        above[has_more] = above[above[has_more]]
    depths = ends - tree.length
    pairs = int((ends * (ends + 1) - depths * (depths + 1)).sum()) // 2
    return int(tree.length.sum()), pairs


def lay_out(flat: Int32Array, offsets: Int64Array, tree: RadixTree) -> ForestArrays:
    """Write the radix tree in depth-first pre-order and find the packed index of each sequence's last token."""
    num_nodes, num_tokens = tree.start.size, int(tree.length.sum())
    first_child, next_sibling, order, packed_start, end = np.full((5, num_nodes + 1), -1, np.int64)
    tokens, parent, position, subtree_end = (np.empty(num_tokens, np.int32) for _ in range(4))
    segment_start, segment_parent = np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32)
    branch_end = np.empty(offsets.size - 1, np.int32)
    fill_forest(
        flat, offsets, *tree[:3], *tree[4:], np.argsort(tree.seen), first_child, next_sibling, order, packed_start, end,
        tokens, parent, position, subtree_end, segment_start, segment_parent, branch_end,
    )  # fmt: skip
    return ForestArrays(tokens, parent, position, subtree_end, segment_start, segment_parent, branch_end)


def branch_indices(parent: Int32Array, branch_end: Int32Array, offsets: Int64Array) -> Int32Array:
    """Return the packed indices of all branches, one after another: int32 [offsets[-1]]."""
    indices = np.empty(offsets[-1], np.int32)
    _fill_indices(parent, branch_end, offsets, indices)
    return indices


@lean
def _slot(keys: Int64Array, key: np.int64) -> np.int64:
    """Return the index of `key` in the open-addressing table, or of the free slot for it (free slots hold -1)."""
    mask = keys.size - 1
    mixed = key * _MULTIPLIER
    slot = (mixed ^ (mixed >> 29)) & mask
    while keys[slot] != -1 and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@lean
def _key(node: np.int64, token: np.int64) -> np.int64:
    # Images are negative tokens, and keys are positive.
    return ((node + 1) << 32) | (token & 0xFFFFFFFF)


@kernel
def _insert(
    flat: Int32Array, offsets: Int64Array, first: int, end: int, start: Int64Array, length: Int64Array,
    parent: Int64Array, seen: Int64Array, is_leaf: BoolArray, keys: Int64Array, nodes: Int64Array, num_nodes: int,
) -> int:  # fmt: skip
    """Add sequences `first` to `end` to the fields of a `RadixTree` with `num_nodes` nodes; return the new number.

    An empty tree has `is_leaf` [2K] true, and all keys -1.
    """
    for i in range(first, end):
        node, at, stop = np.int64(-1), offsets[i], offsets[i + 1]
        while at < stop:
            key = _key(node, flat[at])
            slot = _slot(keys, key)
            if keys[slot] == -1:
                if node != -1 and is_leaf[node]:
                    # Its sequence is a strict prefix of this one: extend the run and read it from this one.
                    start[node] = at - length[node]
                    length[node] += stop - at
                    break
                start[num_nodes], length[num_nodes], parent[num_nodes] = at, stop - at, node
                seen[num_nodes] = at
                keys[slot], nodes[slot] = key, num_nodes
                if node != -1:
                    is_leaf[node] = False
                num_nodes += 1
                break
            child = nodes[slot]
            limit = min(length[child], stop - at)
            same = 1
            while same < limit and flat[start[child] + same] == flat[at + same]:
                same += 1
            if same < length[child] and at + same < stop:
                # The new head takes the parent's table entry; the old node keeps its number, so that the table
                # entries of its children stay valid.
                head = num_nodes
                num_nodes += 1
                start[head], length[head], parent[head] = start[child], same, node
                seen[head], is_leaf[head] = seen[child], False
                nodes[slot] = head
                start[child] += same
                length[child] -= same
                parent[child] = head
                key = _key(head, flat[start[child]])
                slot = _slot(keys, key)
                keys[slot], nodes[slot] = key, child
                child = head
            node = child
            at += same
    return num_nodes


@kernel
def fill_forest(
    flat: Int32Array, offsets: Int64Array, start: Int64Array, length: Int64Array, above: Int64Array, keys: Int64Array,
    nodes: Int64Array, by_appearance: Int64Array, first_child: Int64Array, next_sibling: Int64Array, order: Int64Array,
    packed_start: Int64Array, end: Int64Array, tokens: Int32Array, parent: Int32Array, position: Int32Array,
    subtree_end: Int32Array, segment_start: Int32Array, segment_parent: Int32Array, branch_end: Int32Array,
) -> None:  # fmt: skip
    """Fill the fields of `ForestArrays`; the five arrays [M + 1] hold -1 and are scratch space."""
    _sort(above, by_appearance, first_child, next_sibling, order, end)
    rank, at, num_nodes = next_sibling, 0, start.size
    for s in range(num_nodes):
        node = order[s]
        rank[node] = s
        over = above[node]
        first, last, depth = start[node], -1, 0
        packed_start[node], segment_start[s], segment_parent[s] = at, at, -1
        if over != -1:
            last = packed_start[over] + length[over] - 1
            depth = position[last] + 1
            segment_parent[s] = rank[over]
        for j in range(length[node]):
            tokens[at + j], position[at + j] = flat[first + j], depth + j
            parent[at + j] = at + j - 1
        parent[at] = last
        at += length[node]
        end[node] = at
    for s in range(num_nodes - 1, -1, -1):
        node = order[s]
        over = above[node]
        if over != -1:
            end[over] = max(end[over], end[node])
        for j in range(packed_start[node], packed_start[node] + length[node]):
            subtree_end[j] = end[node]
    for i in range(offsets.size - 1):
        node, at = np.int64(-1), offsets[i]
        while True:
            node = nodes[_slot(keys, _key(node, flat[at]))]
            if offsets[i + 1] - at <= length[node]:
                break
            at += length[node]
        branch_end[i] = packed_start[node] + (offsets[i + 1] - at) - 1


@lean
def _sort(
    above: Int64Array, by_appearance: Int64Array, first_child: Int64Array, next_sibling: Int64Array, order: Int64Array,
    stack: Int64Array,
) -> None:  # fmt: skip
    """Write the nodes in depth-first pre-order; siblings in the order of their first appearance in the input."""
    for i in range(by_appearance.size - 1, -1, -1):
        node = by_appearance[i]
        # The last entry is the virtual root.
        over = above[node] if above[node] != -1 else by_appearance.size
        next_sibling[node] = first_child[over]
        first_child[over] = node
    depth = num_done = 0
    stack[0] = first_child[by_appearance.size]
    while depth >= 0:
        node = stack[depth]
        if node == -1:
            depth -= 1
            continue
        order[num_done] = node
        num_done += 1
        stack[depth] = next_sibling[node]
        depth += 1
        stack[depth] = first_child[node]


@kernel
def _fill_indices(parent: Int32Array, branch_end: Int32Array, offsets: Int64Array, indices: Int32Array) -> None:
    for i in range(branch_end.size):
        token = branch_end[i]
        for at in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            indices[at] = token
            token = parent[token]
