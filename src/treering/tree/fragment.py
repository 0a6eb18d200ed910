"""Fragments: some tokens of a tree as a separate forest, and which of the tokens above they see.

N tokens of the tree   M tokens of the fragment
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.tree.forest import Forest
from treering.tree.image_tokens import image_tokens


class QueryRanges(NamedTuple):
    """Range of query rows that see each key: `first[k] <= q < stop[k]`; empty if `first == stop`.

    `position` is the key's depth in the whole tree, which sliding windows use.
    """

    first: Int64Array
    stop: Int64Array
    position: Int64Array

    @classmethod
    def within(cls, forest: Forest, *, sees_whole_images: bool = False) -> "QueryRanges":
        """Return the ranges of a forest's own tokens: each token is seen by itself and its descendants.

        With `sees_whole_images` a token of an image is seen by all tokens of that image, the earlier ones too.

        Example: in a forest of the branches 5, 6 and 5, 7 the rows that see the three tokens are 0:3, 1:2 and 2:3.
        """
        first = np.arange(forest.num_tokens)
        if sees_whole_images and forest.images:
            placed_tokens = image_tokens(forest)
            first[placed_tokens.at] -= placed_tokens.offset
        return cls(
            first=first,
            stop=forest.subtree_end.astype(np.int64),
            position=forest.position.astype(np.int64),
        )


def take_fragment(tree: Forest, tokens: Int32Array) -> Forest:
    """Return some tokens of a tree, ascending int32 [M], as a forest without branches.

    Tokens whose parent is outside become roots. Positions stay those of the whole tree, so a root's need not be 0.

    Example: the last two tokens of the chain 5, 6, 7 are a forest with parents -1, 0 and positions 1, 2.
    """
    parent = tree.parent[tokens]
    above = np.searchsorted(tokens, parent)
    is_inside = (parent >= 0) & (tokens[np.minimum(above, tokens.size - 1)] == parent)
    subtree_end = np.searchsorted(tokens, tree.subtree_end[tokens]).astype(np.int32)
    # Tokens in a row with the same subtree end form a chain; the end changes where a chain branches or stops.
    is_start = np.concatenate([np.ones(min(1, tokens.size), bool), subtree_end[1:] != subtree_end[:-1]])
    segment_start = np.flatnonzero(is_start)
    local_parent = np.where(is_inside, above, -1)
    segment_of = np.cumsum(is_start) - 1
    first_parent = local_parent[segment_start]
    return Forest(
        tokens=tree.tokens[tokens],
        parent=local_parent.astype(np.int32),
        position=tree.position[tokens],
        subtree_end=subtree_end,
        branch_end=np.empty(0, np.int32),
        segment_start=segment_start.astype(np.int32),
        segment_parent=np.where(first_parent < 0, -1, segment_of[first_parent]).astype(np.int32),
        images=tree.images,
        routed_experts=None if tree.routed_experts is None else tree.routed_experts[tokens],
    )


def query_ranges(tree: Forest, keys: Int32Array, queries: Int32Array) -> QueryRanges:
    """Return which query tokens see each key token, as ranges of indices into `queries`.

    Args:
        tree: the whole tree.
        keys: int32 [M], packed indices.
        queries: int32, packed indices, ascending. Depth-first order makes the queries that see a key contiguous.

    Example: in a tree with the branches 5, 6 and 5, 7 the query 7 sees the key 5 and not the key 6.
    """
    return QueryRanges(
        first=np.searchsorted(queries, keys).astype(np.int64),
        stop=np.searchsorted(queries, tree.subtree_end[keys]).astype(np.int64),
        position=tree.position[keys].astype(np.int64),
    )
