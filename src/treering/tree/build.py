"""Sequences to prefix trees: one radix-tree insertion per sequence, then one depth-first walk.

Insertion compares whole runs of tokens and looks up the child table only where a run ends: one comparison per flat
token plus one look-up per segment that a sequence passes.

    F flat tokens   K sequences   M nodes of the radix tree (at most 2K)   N distinct tokens
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from treering.arrays import BoolArray, Int32Array, Int64Array

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
    """The forest in depth-first pre-order; the fields are those of `Forest`."""

    tokens: Int32Array  # [N]
    parent: Int32Array  # [N]
    position: Int32Array  # [N]
    subtree_end: Int32Array  # [N]
    segment_start: Int32Array  # [M]
    segment_parent: Int32Array  # [M]
    branch_end: Int32Array  # [K]


@njit(cache=True, inline="always")
def _slot(keys: Int64Array, key: np.int64) -> np.int64:
    """Index of `key` in the open-addressing table, or of the free slot for it (free slots hold -1)."""
    mask = keys.size - 1
    mixed = key * _MULTIPLIER
    slot = (mixed ^ (mixed >> 29)) & mask
    while keys[slot] != -1 and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, inline="always")
def _key(node: np.int64, token: np.int64) -> np.int64:
    return ((node + 1) << 32) | token


@njit(cache=True)
def insert_sequences(flat: Int32Array, offsets: Int64Array) -> RadixTree:
    """Inserts `flat[offsets[i]:offsets[i + 1]]` for every i, in order, into one radix tree."""
    tree, is_leaf = empty_tree(offsets.size - 1)
    num_nodes = insert_some(flat, offsets, 0, offsets.size - 1, tree, is_leaf, 0)
    filled: RadixTree = filled_part(tree, num_nodes)
    return filled


@njit(cache=True)
def empty_tree(num_sequences: int) -> tuple[RadixTree, BoolArray]:
    """Room for the radix tree of so many sequences, and whether each node is a leaf, bool [2K]."""
    capacity = 2 * num_sequences
    table_size = 16
    while table_size < 2 * capacity:
        table_size *= 2
    tree = RadixTree(
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.full(table_size, -1, np.int64),
        np.empty(table_size, np.int64),
    )
    return tree, np.ones(capacity, np.bool_)


@njit(cache=True)
def filled_part(tree: RadixTree, num_nodes: int) -> RadixTree:
    """The tree without the room that no node has taken."""
    start, length, parent, seen, keys, nodes = tree
    return RadixTree(start[:num_nodes], length[:num_nodes], parent[:num_nodes], seen[:num_nodes], keys, nodes)


@njit(cache=True)
def insert_some(
    flat: Int32Array,
    offsets: Int64Array,
    first: int,
    stop: int,
    tree: RadixTree,
    is_leaf: BoolArray,
    num_nodes: int,
) -> int:
    """Inserts the sequences `first` to `stop` after those before them; returns how many nodes there are then."""
    start, length, parent, seen, keys, nodes = tree
    for i in range(first, stop):
        node, at, end = np.int64(-1), offsets[i], offsets[i + 1]
        while at < end:
            slot = _slot(keys, _key(node, flat[at]))
            if keys[slot] == -1:
                if node != -1 and is_leaf[node]:
                    # Its sequence is a strict prefix of this one: the run is extended and read from this one.
                    start[node] = at - length[node]
                    length[node] += end - at
                    break
                start[num_nodes], length[num_nodes], parent[num_nodes] = at, end - at, node
                seen[num_nodes] = at
                keys[slot], nodes[slot] = _key(node, flat[at]), num_nodes
                if node != -1:
                    is_leaf[node] = False
                num_nodes += 1
                break
            child = nodes[slot]
            limit = min(length[child], end - at)
            same = 1
            while same < limit and flat[start[child] + same] == flat[at + same]:
                same += 1
            if same < length[child] and at + same < end:
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
                tail_slot = _slot(keys, _key(head, flat[start[child]]))
                keys[tail_slot], nodes[tail_slot] = _key(head, flat[start[child]]), child
                child = head
            node = child
            at += same
    return num_nodes


@njit(cache=True)
def _pre_order(tree: RadixTree) -> Int64Array:
    """Nodes in depth-first pre-order; siblings in the order of their first appearance in the input."""
    num_nodes = tree.start.size
    first_child = np.full(num_nodes + 1, -1, np.int64)  # the last entry is the virtual root
    next_sibling = np.full(num_nodes, -1, np.int64)
    for node in np.argsort(tree.seen)[::-1]:
        parent = tree.parent[node]
        next_sibling[node] = first_child[parent]
        first_child[parent] = node
    order = np.empty(num_nodes, np.int64)
    stack = np.empty(num_nodes + 1, np.int64)
    depth = 0
    stack[0] = first_child[-1]
    num_done = 0
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
    return order


@njit(cache=True)
def count_work(tree: RadixTree) -> tuple[np.int64, np.int64]:
    """Distinct tokens of a radix tree, and their attention pairs: what its layout would have, without it."""
    ends = np.empty(tree.start.size, np.int64)
    num_tokens = num_pairs = np.int64(0)
    for node in _pre_order(tree):
        above = tree.parent[node]
        depth = np.int64(0) if above == -1 else ends[above]
        ends[node] = depth + tree.length[node]
        num_tokens += tree.length[node]
        num_pairs += (ends[node] * (ends[node] + 1) - depth * (depth + 1)) // 2
    return num_tokens, num_pairs


@njit(cache=True)
def lay_out(flat: Int32Array, offsets: Int64Array, tree: RadixTree) -> ForestArrays:
    """Writes the radix tree in depth-first pre-order and finds the packed index of each sequence's last token."""
    order = _pre_order(tree)
    num_tokens = tree.length.sum()
    tokens = np.empty(num_tokens, np.int32)
    parent = np.empty(num_tokens, np.int32)
    position = np.empty(num_tokens, np.int32)
    subtree_end = np.empty(num_tokens, np.int32)
    packed_start = np.empty(order.size, np.int64)  # by node
    rank = np.empty(order.size, np.int64)  # by node
    segment_start = np.empty(order.size, np.int32)
    segment_parent = np.empty(order.size, np.int32)
    at = 0
    for s in range(order.size):
        node = order[s]
        rank[node] = s
        packed_start[node] = at
        above = tree.parent[node]
        last = -1 if above == -1 else packed_start[above] + tree.length[above] - 1
        depth = 0 if above == -1 else position[last] + 1
        segment_start[s] = at
        segment_parent[s] = -1 if above == -1 else rank[above]
        for j in range(tree.length[node]):
            tokens[at + j] = flat[tree.start[node] + j]
            parent[at + j] = last if j == 0 else at + j - 1
            position[at + j] = depth + j
        at += tree.length[node]
    end = np.empty(order.size, np.int64)  # by node
    for node in order:
        end[node] = packed_start[node] + tree.length[node]
    for s in range(order.size - 1, -1, -1):
        above = tree.parent[order[s]]
        if above != -1:
            end[above] = max(end[above], end[order[s]])
    for node in order:
        subtree_end[packed_start[node] : packed_start[node] + tree.length[node]] = end[node]
    branch_end = np.empty(offsets.size - 1, np.int32)
    for i in range(offsets.size - 1):
        node, at, stop = np.int64(-1), offsets[i], offsets[i + 1]
        while True:
            node = tree.table_nodes[_slot(tree.table_keys, _key(node, flat[at]))]
            if stop - at <= tree.length[node]:
                break
            at += tree.length[node]
        branch_end[i] = packed_start[node] + (stop - at) - 1
    return ForestArrays(tokens, parent, position, subtree_end, segment_start, segment_parent, branch_end)


@njit(cache=True)
def branch_indices(parent: Int32Array, branch_end: Int32Array, offsets: Int64Array) -> Int32Array:
    """Packed index of every token of every branch, branches one after another: int32 [offsets[-1]]."""
    indices = np.empty(offsets[-1], np.int32)
    for i in range(branch_end.size):
        token = branch_end[i]
        for at in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            indices[at] = token
            token = parent[token]
    return indices
