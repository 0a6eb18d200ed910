"""Texts of running rows as compiled calls read and update them, and the matches in them.

Texts are append-only with hash chains: each position links to the previous one that ends in the same tokens. A search
follows a chain from the newest position. Chains may contain overwritten positions, and positions of other tokens with
the same hash. Readers compare the tokens themselves, so a wrong link costs one comparison. Matches are in the rollouts
and prompts of the row's group, in the row itself, and in other groups.

    B rows   S slots   U units   C entries of the text   H heads of each kind
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.features import FAR, OTHERS, OWN, SIBLINGS, shift_bucket
from treering.history.jit import prefetch
from treering.history.match.matches import IN_RUNNING, Matches, is_known, measure, put
from treering.history.store.prompt_index import MARKER, check_entries

LONG = 3
"""Tokens that agree along a long chain; along a short chain it is one token."""

EVERYWHERE = 0
"""Scope of links across all scopes; other scopes are greater."""

_LEAST_HEADS = 16
_SALT_SHORT, _SALT_LONG = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


class HashChains(NamedTuple):
    """Text and links between its positions; 16 bytes per entry, and 12 per head.

    Each kind of link has separate heads. If a common token and three rare ones shared a head, its newest positions
    would all be those of the common token.
    """

    tokens: Int32Array  # [C]
    short: Int32Array  # [C], the previous position with the same token; -1 for none
    long: Int32Array  # [C], the previous position with the same three tokens
    wide: Int32Array  # [C], the same in any scope
    short_heads: Int32Array  # [H], the newest position by hash
    long_heads: Int32Array  # [H]
    wide_heads: Int32Array  # [H]


def make_hash_chains(num_entries: int) -> HashChains:
    """Make chains of `num_entries` entries, all of them markers.

    Raises:
        InputError: more than `MAX_ENTRIES`.
    """
    check_entries(num_entries, "the text of running rows", "run fewer rows at a time, or lower max_live_tokens")
    num_heads = max(num_entries, _LEAST_HEADS)
    sizes = [num_entries] * 4 + [num_heads] * 3
    # One allocation is large enough for huge pages, where its parts may not be.
    whole, ends = np.full(sum(sizes), -1, np.int32), accumulate(sizes)
    tokens, *others = (whole[end - size : end] for size, end in zip(sizes, ends, strict=True))
    tokens[:] = MARKER
    return HashChains(tokens, *others)


@lean
def short_head(scope: int, token: int, num_heads: int) -> int:
    """Return the head of a token in a scope."""
    mixed = (np.uint64(scope) * _SALT_LONG + np.uint64(token + 1)) * _SALT_SHORT
    found: int = _among(mixed ^ (mixed >> np.uint64(29)), num_heads)
    return found


@lean
def long_head(scope: int, first: int, second: int, third: int, num_heads: int) -> int:
    """Return the head of three tokens in a scope, in the order of the text."""
    mixed = (np.uint64(first + 2) * _SALT_SHORT + np.uint64(second + 3)) * _SALT_LONG + np.uint64(third + 5)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _SALT_SHORT + np.uint64(scope) * _SALT_LONG
    found: int = _among(mixed ^ (mixed >> np.uint64(29)), num_heads)
    return found


@lean
def _among(mixed: np.uint64, num_heads: int) -> int:
    return int((mixed * _MIX >> np.uint64(32)) * np.uint64(num_heads) >> np.uint64(32))


@lean
def newest_of_three(heads: Int32Array, scope: int, context: Int32Array) -> int:
    """Return the newest position of the last three tokens of a context, by the heads of one kind; -1 for none."""
    size = context.size
    head = long_head(scope, context[size - 3], context[size - 2], context[size - 1], heads.size)
    return int(heads[np.uintp(head)])


@lean
def link(links: Int32Array, heads: Int32Array, head: int, at: int) -> None:
    """Make a position the newest of its head; if it is already, do nothing, so that it does not link to itself."""
    if heads[head] != at:
        links[at] = heads[head]
        heads[head] = at


@lean
def append(chains: HashChains, at: int, first: int, token: int, scope: int) -> None:
    """Write a token at a position of a text that began at `first`, link it, and end the text after it."""
    chains.tokens[at] = token
    chains.tokens[at + 1] = MARKER
    link(chains.short, chains.short_heads, short_head(scope, token, chains.short_heads.size), at)
    if at - first >= LONG - 1:
        earlier, before, num_heads = chains.tokens[at - 2], chains.tokens[at - 1], chains.long_heads.size
        link(chains.long, chains.long_heads, long_head(scope, earlier, before, token, num_heads), at)
        link(chains.wide, chains.wide_heads, long_head(EVERYWHERE, earlier, before, token, num_heads), at)
    else:
        chains.long[at] = chains.wide[at] = -1


@lean
def prefetch_append(chains: HashChains, scope: int, context: Int32Array, i: int) -> None:
    """Prefetch what `append` reads when it writes a context's token `i`, where i >= 2."""
    num_heads = chains.long_heads.size
    earlier, before, token = context[i - 2], context[i - 1], context[i]
    prefetch(chains.short_heads, short_head(scope, token, chains.short_heads.size))
    prefetch(chains.long_heads, long_head(scope, earlier, before, token, num_heads))
    prefetch(chains.wide_heads, long_head(EVERYWHERE, earlier, before, token, num_heads))


UNIT_BITS = 5
UNIT = 1 << UNIT_BITS
"""Entries per unit of room."""
_NUM_COMPARED = 32
_NUM_PREFETCHED = 16

_CUT = -2
# Begins a text whose first tokens were dropped, and equals no token.


class Running(NamedTuple):
    """Arrays of `RunningRows`, for compiled calls."""

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
    """Return the slot that a position is in."""
    return int(running.owners[np.uintp(at) >> np.uintp(UNIT_BITS)])


@lean
def is_in_text(running: Running, owner: int, at: int) -> bool:
    """Return whether a position is in its owner's text: a link may lead to text that was overwritten or moved."""
    slot = np.uintp(owner)
    # Positions before the text become far ones after it, because the difference is unsigned.
    return bool(np.uint64(at - running.begins[slot]) <= np.uint64(running.num_noted[slot] - running.first[slot]))


@lean
def note_rows(
    running: Running, scopes: Int64Array, tokens: Int32Array, num_tokens: Int64Array, num_prompt: Int64Array
) -> None:
    """Append the new tokens of all rows to their slots.

    Args:
        running: changed in place.
        scopes: int64 [B], scopes of the rows.
        tokens: int32 [B, L], contexts of the rows.
        num_tokens: int64 [B], tokens of each context.
        num_prompt: int64 [B], prompt tokens among them.
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
    """Make a slot hold the tokens `begin` to `end` of a context, by appending the new ones."""
    chains = running.chains
    base, capacity = running.begins[slot], running.sizes[slot] - 2
    noted, first = running.num_noted[slot], running.first[slot]
    if noted > 0 and (end - first > capacity or not _is_continued(chains, base, first, noted, context, end)):
        noted = 0
    if noted == 0:
        # Half of the room stays free, so that a full slot is rewritten only once per that many tokens.
        first = noted = begin if end - begin <= capacity else end - capacity // 2
        chains.tokens[base] = MARKER if first == begin else _CUT
        chains.tokens[base + 1] = MARKER
        if first == begin:
            link(chains.short, chains.short_heads, short_head(scope, MARKER, chains.short_heads.size), base)
    for i in range(noted, end):
        append(chains, base + 1 + i - first, base if first == begin else base + 1, context[i], scope)
    running.num_noted[slot], running.first[slot], running.scopes[slot] = end, first, scope


@lean
def _is_continued(chains: HashChains, base: int, first: int, noted: int, context: Int32Array, end: int) -> bool:
    """Return whether a context continues its slot's text, judged by the newest tokens of the text."""
    if noted > end:
        return False
    begin = max(first, noted - _NUM_COMPARED)
    held, newest = chains.tokens[base + 1 + begin - first : base + 1 + noted - first], context[begin:noted]
    differs = np.int32(0)
    # No early exit, so that the comparison vectorises.
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
    """Add the newest matches in the group's running rows and in the row itself."""
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
        at = int(live.short_heads[np.uintp(short_head(group, token, live.short_heads.size))])
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
    """Add the match that ends at live.tokens[at] if at least `least` tokens agree."""
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
    """Add the newest matches of the context's last three tokens in other groups' rollouts and prompts."""
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
    """Return whether a position is in a text of the group: a link may lead to another group's."""
    owner = owner_of(running, at)
    return bool(running.scopes[np.uintp(owner)] == group and is_in_text(running, owner, at))
