"""The texts of running rows as compiled calls read and update them.

B rows   S slots   U units
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.history.match.hash_chains import LONG, HashChains, append, link_begin, prefetch_append
from treering.history.match.regions import UNIT_BITS
from treering.history.store.prompt_index import MARKER
from treering.lean import lean

_NUM_COMPARED = 32
_NUM_PREFETCHED = 16

_CUT = -2
# Begins a text whose first tokens were dropped: equal to nothing.


class Running(NamedTuple):
    """The arrays of `RunningRows` and its `Regions`, for compiled calls."""

    chains: HashChains
    num_noted: Int64Array  # [S]
    first: Int64Array  # [S]
    scopes: Int64Array  # [S]
    begins: Int64Array  # [S]
    sizes: Int64Array  # [S]
    owners: Int32Array  # [U]
    slots: Int64Array  # [B], of the rows' rollouts
    prompt_slots: Int64Array  # [B], of their prompts


@lean
def owner_of(running: Running, at: int) -> int:
    """The slot that last owned a position."""
    return int(running.owners[np.uintp(at) >> np.uintp(UNIT_BITS)])


@lean
def is_in_text(running: Running, owner: int, at: int) -> bool:
    """Whether a position is in its owner's text: a link may lead to text that was overwritten or moved."""
    slot = np.uintp(owner)
    # Unsigned: a position before the text becomes one far after it.
    return bool(np.uint64(at - running.begins[slot]) <= np.uint64(running.num_noted[slot] - running.first[slot]))


@lean
def note_rows(
    running: Running, scopes: Int64Array, tokens: Int32Array, num_tokens: Int64Array, num_prompt: Int64Array
) -> None:
    """Appends the new tokens of all rows to their slots.

    Args:
        running: changed in place.
        scopes: int64 [B], of the rows.
        tokens: int32 [B, L], their contexts.
        num_tokens: int64 [B], how many each has.
        num_prompt: int64 [B], how many of these are the prompt.
    """
    chains, num_noted = running.chains, running.num_noted
    for b in range(scopes.size):
        noted = num_noted[running.slots[b]]
        if num_prompt[b] + LONG <= noted < num_tokens[b]:
            for i in range(noted, min(num_tokens[b], noted + _NUM_PREFETCHED)):
                prefetch_append(chains, scopes[b], tokens[b], i)
    for b in range(scopes.size):
        _note(running, running.prompt_slots[b], scopes[b], tokens[b], 0, num_prompt[b])
        _note(running, running.slots[b], scopes[b], tokens[b], num_prompt[b], num_tokens[b])


@lean
def _note(running: Running, slot: int, scope: int, context: Int32Array, begin: int, end: int) -> None:
    """Makes a slot hold the tokens `begin` to `end` of a context, appending the new ones."""
    chains = running.chains
    base, capacity = running.begins[slot], running.sizes[slot] - 2
    noted, first = running.num_noted[slot], running.first[slot]
    if noted > 0 and (end - first > capacity or not _is_continued(chains, base, first, noted, context, end)):
        noted = 0
    if noted == 0:
        # Half of the region stays free, so that a full slot is rewritten once per that many tokens.
        first = noted = begin if end - begin <= capacity else end - capacity // 2
        chains.tokens[base] = MARKER if first == begin else _CUT
        chains.tokens[base + 1] = MARKER
        if first == begin:
            link_begin(chains, base, scope)
    for i in range(noted, end):
        append(chains, base + 1 + i - first, base if first == begin else base + 1, context[i], scope)
    running.num_noted[slot], running.first[slot], running.scopes[slot] = end, first, scope


@lean
def _is_continued(chains: HashChains, base: int, first: int, noted: int, context: Int32Array, end: int) -> bool:
    """Whether a context continues its slot's text, judged by the newest tokens of the text."""
    if noted > end:
        return False
    begin = max(first, noted - _NUM_COMPARED)
    held, newest = chains.tokens[base + 1 + begin - first : base + 1 + noted - first], context[begin:noted]
    differs = np.int32(0)
    # Without an early exit, so that the comparison vectorises.
    for i in range(held.size):
        differs |= held[i] ^ newest[i]
    return bool(differs == 0)
