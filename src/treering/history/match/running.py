"""The texts of running rows as compiled calls read and update them, and the matches in them.

Matches are in the rollouts and prompts of the row's group, in the row itself, and in other groups.

    B rows   S slots   U units
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.features import FAR, OTHERS, OWN, SIBLINGS, shift_bucket
from treering.history.match.hash_chains import (
    EVERYWHERE,
    LONG,
    HashChains,
    append,
    link_begin,
    newest_of_three,
    newest_of_token,
    prefetch_append,
)
from treering.history.match.matches import IN_RUNNING, Matches, is_known, measure, put
from treering.history.store.prompt_index import MARKER

UNIT_BITS = 5
UNIT = 1 << UNIT_BITS
"""Entries per unit of room."""
_NUM_COMPARED = 32
_NUM_PREFETCHED = 16

_CUT = -2
# Begins a text whose first tokens were dropped: equal to nothing.


class Running(NamedTuple):
    """The arrays of `RunningRows`, for compiled calls."""

    chains: HashChains
    num_noted: Int64Array  # [S]
    first: Int64Array  # [S]
    scopes: Int64Array  # [S]
    begins: Int64Array  # [S], of the slots' texts
    sizes: Int64Array  # [S], entries that each may have
    owners: Int32Array  # [U], the slot of each unit
    slots: Int64Array  # [B], of the rows' rollouts
    prompt_slots: Int64Array  # [B], of their prompts


@lean
def owner_of(running: Running, at: int) -> int:
    """The slot that a position is in."""
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
        # Half of the room stays free, so that a full slot is rewritten once per that many tokens.
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


_MAX_LIVE = 8
_MAX_LOOKS = 48
_MAX_WIDE = 4
_MAX_WIDE_LOOKS = 24


@lean
def find_in_group(
    matches: Matches, num: int, running: Running, slot: int, prompt_slot: int, group: int, context: Int32Array,
    num_prompt: int, enabled: BoolArray,
) -> int:  # fmt: skip
    """Adds the newest matches in the group's running rows and in the row itself."""
    live, size, before = running.chains, context.size, num
    if size - num_prompt >= LONG or size == num_prompt >= LONG:
        at = newest_of_three(live.long_heads, group, context)
        rank = 0
        for _ in range(_MAX_LOOKS):
            if at < 0 or rank == _MAX_LIVE:
                break
            if _is_of_group(running, group, at):
                num = _put_running(matches, num, running, slot, prompt_slot, at, context, num_prompt, LONG, enabled)
                rank += 1
            at = live.long[at]
    for begins in range(2):
        if begins == 1 and size > num_prompt:
            break
        if begins == 0 and size == 0:
            continue
        token = MARKER if begins == 1 else context[size - 1]
        at = newest_of_token(live, group, token)
        rank = 0
        for _ in range(_MAX_LOOKS):
            if at < 0 or rank == _MAX_LIVE or num - before >= _MAX_LIVE:
                break
            if _is_of_group(running, group, at):
                num = _put_running(matches, num, running, slot, prompt_slot, at, context, num_prompt, 1, enabled)
                rank += 1
            at = live.short[at]
    return num


@lean
def _put_running(
    matches: Matches, num: int, running: Running, slot: int, prompt_slot: int, at: int, context: Int32Array,
    num_prompt: int, least: int, enabled: BoolArray,
) -> int:  # fmt: skip
    """Adds the match that ends at live.tokens[at] if at least so many tokens agree."""
    live = running.chains
    if live.tokens[at + 1] == MARKER:
        return num
    owner = owner_of(running, at)
    is_prompt = owner == prompt_slot
    source = OWN if is_prompt or owner == slot else SIBLINGS
    if not enabled[source] or is_known(matches, num, IN_RUNNING, at + 1):
        return num
    length, edit = measure(live.tokens, at, context, 0 if is_prompt else num_prompt)
    if length < least:
        return num
    shift = 0
    if source == SIBLINGS:
        begin, num_dropped = running.begins[np.uintp(owner)], 0
        if running.chains.tokens[begin] == _CUT:
            # The prompt is as long as the row's.
            num_dropped = running.first[np.uintp(owner)] - num_prompt
        shift = shift_bucket(at - begin + num_dropped - (context.size - num_prompt))
    return int(put(matches, num, source, IN_RUNNING, at + 1, length, edit, shift))


@lean
def find_in_other_groups(
    matches: Matches, num: int, running: Running, group: int, context: Int32Array, num_prompt: int
) -> int:
    """Adds the newest matches of the context's last three tokens in other groups' rollouts and prompts."""
    live, size = running.chains, context.size
    if size - num_prompt < LONG:
        return num
    at, rank = newest_of_three(live.wide_heads, EVERYWHERE, context), 0
    for _ in range(_MAX_WIDE_LOOKS):
        if at < 0 or rank == _MAX_WIDE:
            break
        owner = owner_of(running, at)
        is_elsewhere = running.scopes[np.uintp(owner)] != group
        if is_elsewhere and is_in_text(running, owner, at) and live.tokens[at + 1] != MARKER:
            length, edit = measure(live.tokens, at, context, num_prompt)
            if length >= LONG and not is_known(matches, num, IN_RUNNING, at + 1):
                num = put(matches, num, OTHERS, IN_RUNNING, at + 1, length, edit, FAR)
                rank += 1
        at = live.wide[at]
    return num


@lean
def _is_of_group(running: Running, group: int, at: int) -> bool:
    """Whether a position is in a text of the group: a link may lead to another group's."""
    owner = owner_of(running, at)
    return bool(running.scopes[np.uintp(owner)] == group and is_in_text(running, owner, at))
