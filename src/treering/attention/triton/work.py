"""Work lists of the kernels: which blocks each program visits, heaviest programs first.

P pairs of blocks   I items, one per program and head   S slots for partial sums
"""

from dataclasses import dataclass, replace

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.attention.blocks import BlockPairs

DIRECT = -1
"""The slot of an item that writes its result directly to the output."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkList:
    """Items that together visit every pair once.

    Attributes:
        items: int32 [I, 6]: an item's own block; where in `visits` its unmasked blocks start and stop; the same of its
            masked ones; and the slot that takes its partial sum, `DIRECT` for none.
        visits: int32 [P + 1], the other blocks of the pairs; plus one, never visited, so that prefetching is safe.
        splits: int32 [B, 3], of each block that several items share: its number, its first slot and one past its last.
        num_slots: S.
    """

    items: Int32Array
    visits: Int32Array
    splits: Int32Array
    num_slots: int


def work_by_query(pairs: BlockPairs) -> WorkList:
    """One item per query block, which visits key blocks.

    Example: a prompt and two responses of one block each are the items of blocks 1, 2 and 0, with two visits, two and
    one.
    """
    own, other = pairs.query_block, pairs.key_block
    return _listed(own, other, pairs.is_full, pairs.num_query_blocks, max_visits=None)


def work_by_key(pairs: BlockPairs, max_visits: int) -> WorkList:
    """Items of key blocks, which visit query blocks, at most `max_visits` each.

    All queries see a prompt's keys, so with one program per key block most of a device would wait for a few programs.
    Several programs share such a block and write partial sums to slots, which are then added in order.

    Example: a key block with 10 visits and at most 4 is three items, of 3, 3 and 4 visits.
    """
    own, other = pairs.key_block, pairs.query_block
    return _listed(own, other, pairs.is_full, pairs.num_key_blocks, max_visits=max_visits)


def without_short_blocks(
    pairs: BlockPairs, *, num_queries: int, num_keys: int, query_size: int, key_size: int
) -> BlockPairs:
    """The same pairs, in which a short last block of queries or keys does not count as full.

    Kernels read full blocks without a bounds check.
    """
    is_whole = ((pairs.query_block + 1) * query_size <= num_queries) & ((pairs.key_block + 1) * key_size <= num_keys)
    return replace(pairs, is_full=pairs.is_full & is_whole)


def _listed(
    own: Int64Array, other: Int64Array, is_full: BoolArray, num_blocks: int, *, max_visits: int | None
) -> WorkList:
    order = np.lexsort((other, ~is_full, own))
    visits = np.append(other[order], 0)
    count = np.bincount(own, minlength=num_blocks)
    middle = np.cumsum(count) - count + np.bincount(own[is_full], minlength=num_blocks)
    num_items = np.ones(num_blocks, np.int64) if max_visits is None else np.maximum(1, -(-count // max_visits))
    block = np.repeat(np.arange(num_blocks), num_items)
    place = np.arange(block.size) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    base = (np.cumsum(count) - count)[block]
    start, stop = (base + (place + more) * count[block] // num_items[block] for more in (0, 1))
    is_split = num_items[block] > 1
    slot = np.where(is_split, np.cumsum(is_split) - 1, DIRECT)
    middle = np.clip(middle[block], start, stop)
    items = np.stack([block, start, middle, middle, stop, slot], 1)
    heaviest_first = np.argsort(start - stop, kind="stable")
    shared = np.flatnonzero(num_items > 1)
    last_slot = np.cumsum(num_items[shared])
    return WorkList(
        items=items[heaviest_first].astype(np.int32),
        visits=visits.astype(np.int32),
        splits=np.stack([shared, last_slot - num_items[shared], last_slot], 1).astype(np.int32),
        num_slots=int(is_split.sum()),
    )
