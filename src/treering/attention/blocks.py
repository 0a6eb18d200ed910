"""Find which blocks of keys each block of queries visits, from ranges of rows per key, never from N x N pairs.

GPU kernels skip all other blocks and apply no mask in blocks that are marked full.

    Q query rows   K keys   P pairs of blocks   R blocks of one side   C entries of a list
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.attention.layout import to_device
from treering.tree.partition import QueryRanges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPairs:
    """Pairs of a query block and a key block that may hold a visible pair of tokens, by query block, then key block.

    Attributes:
        query_block: int64 [P].
        key_block: int64 [P].
        is_full: bool [P], whether every query of the query block sees every key of the key block, and both blocks are
            of full length, so that kernels need no bounds check there.
        num_query_blocks: number of query blocks; the last one may be short.
        num_key_blocks: number of key blocks, likewise.
    """

    query_block: Int64Array
    key_block: Int64Array
    is_full: BoolArray
    num_query_blocks: int
    num_key_blocks: int

    def lists(self, device: torch.device, *, is_by_key: bool = False, is_square: bool = False) -> list[Tensor]:
        """List for each block of one side the blocks of the other that it visits: masked ones, then full ones.

        Returns:
            Four int32 tensors: lengths [1, 1, R] and blocks [1, 1, R, C] of the masked pairs, then of the full ones. R
            and C are at least 2, padded with empty lists and entries, because compilers make separate graphs for sizes
            of 1.

        Args:
            device: device of the tensors.
            is_by_key: whether the R blocks are key blocks, which visit query blocks.
            is_square: whether R and C are the numbers of all blocks, however few; else C is the longest list.
        """
        own, other = (self.key_block, self.query_block) if is_by_key else (self.query_block, self.key_block)
        num_own, num_other = self.num_query_blocks, self.num_key_blocks
        if is_by_key:
            num_own, num_other = num_other, num_own
        num_own = num_own if is_square else max(2, num_own)
        order = np.lexsort((other, own))
        found = []
        for chosen in (order[~self.is_full[order]], order[self.is_full[order]]):
            lengths = np.bincount(own[chosen], minlength=num_own)
            width = num_other if is_square else max(2, int(lengths.max(initial=0)))
            blocks = np.zeros((num_own, width), np.int32)
            first = np.cumsum(lengths) - lengths
            blocks[own[chosen], np.arange(chosen.size) - np.repeat(first, lengths)] = other[chosen]
            found += [to_device(array.astype(np.int32), device)[None, None] for array in (lengths, blocks)]
        return found


def find_block_pairs(
    ranges: QueryRanges, query_position: Int64Array, *, query_size: int, key_size: int, window: int | None = None
) -> BlockPairs:
    """Return the pairs of blocks that are not empty, in O(Q + K + P).

    A key block is visited from the first row that sees any of its keys to the last one. In a forest this skips every
    empty pair of blocks, since the rows that see a key are contiguous; with a window or an ancestor's keys a few empty
    pairs may remain.

    Args:
        ranges: query rows that see each of the K keys.
        query_position: int64 [Q], depth of each query.
        query_size: rows of a query block.
        key_size: keys of a key block.
        window: queries see keys less than this many positions before them; None for all.

    Example: a prompt of 128 tokens and two responses of 128 in blocks of 128 are five pairs, two of them full.
    """
    num_queries, num_keys = query_position.size, ranges.first.size
    num_query_blocks, num_key_blocks = -(-num_queries // query_size), -(-num_keys // key_size)
    starts = np.arange(num_key_blocks) * key_size
    is_seen = ranges.first < ranges.stop
    first = _reduce(np.minimum, np.where(is_seen, ranges.first, num_queries), starts)
    last = _reduce(np.maximum, np.where(is_seen, ranges.stop, 0), starts)
    low, high = first // query_size, np.minimum(-(-last // query_size), num_query_blocks)
    counts = np.maximum(high - low, 0)
    key_block = np.repeat(np.arange(num_key_blocks), counts)
    query_block = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    row_start, row_stop = query_block * query_size, (query_block + 1) * query_size
    all_first, all_last = _reduce(np.maximum, ranges.first, starts), _reduce(np.minimum, ranges.stop, starts)
    is_full = (all_first[key_block] <= row_start) & (row_stop <= all_last[key_block])
    is_full &= (row_stop <= num_queries) & ((key_block + 1) * key_size <= num_keys)
    if window is not None:
        rows = np.arange(num_query_blocks) * query_size
        nearest = _reduce(np.minimum, query_position, rows)[query_block]
        farthest = _reduce(np.maximum, query_position, rows)[query_block]
        is_near = nearest - _reduce(np.maximum, ranges.position, starts)[key_block] < window
        is_full &= farthest - _reduce(np.minimum, ranges.position, starts)[key_block] < window
        query_block, key_block, is_full = query_block[is_near], key_block[is_near], is_full[is_near]
    order = np.lexsort((key_block, query_block))
    return BlockPairs(
        query_block=query_block[order],
        key_block=key_block[order],
        is_full=is_full[order],
        num_query_blocks=num_query_blocks,
        num_key_blocks=num_key_blocks,
    )


def _reduce(extreme: np.ufunc, values: Int64Array, starts: Int64Array) -> Int64Array:
    reduced: Int64Array = extreme.reduceat(values, starts) if starts.size else values[:0]
    return reduced
