"""Places in what is running: the rollouts of a row's group, its prompt, the row itself, and those of other groups.

Knows chains of live texts. Knows nothing of published history.
"""

import numpy as np
from numpy.typing import NDArray

from treering.history.chains import EVERYWHERE, LONG, Chains, long_head, short_head
from treering.history.features import FAR, OTHERS, OWN, SIBLINGS, rank_bucket, shift_bucket
from treering.history.index import MARKER
from treering.history.lean import lean
from treering.history.places import IN_LIVE, Places, is_known, put
from treering.history.search import measure

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_MAX_LIVE = 8
_MAX_LOOKS = 48
_MAX_WIDE = 4
_MAX_WIDE_LOOKS = 24


@lean
def find_in_live(
    places: Places, num: int, live: Chains, num_noted: Int64Array, firsts: Int64Array, scopes: Int64Array, width: int,
    slot: int, prompt_slot: int, group: int, context: Int32Array, num_prompt: int, uses: NDArray[np.bool_],
) -> int:  # fmt: skip
    """Notes the newest places of the group's running rows, and of the row itself, that end as the context does."""
    size = context.size
    before = num
    num_heads = live.heads.size
    if size - num_prompt >= LONG or size == num_prompt >= LONG:
        at = live.heads[long_head(group, context[size - 3], context[size - 2], context[size - 1], num_heads)]
        rank = 0
        for _ in range(_MAX_LOOKS):
            if at < 0 or rank == _MAX_LIVE:
                break
            if _is_of_group(num_noted, firsts, scopes, width, group, at):
                num = _put_live(places, num, live, width, slot, prompt_slot, at, context, num_prompt, LONG, rank, uses)
                rank += 1
            at = live.long[at]
    for begins in range(2):
        if begins == 1 and size > num_prompt:
            break
        if begins == 0 and size == 0:
            continue
        token = MARKER if begins == 1 else context[size - 1]
        at = live.heads[short_head(group, token, num_heads)]
        rank = 0
        for _ in range(_MAX_LOOKS):
            if at < 0 or rank == _MAX_LIVE or num - before >= _MAX_LIVE:
                break
            if _is_of_group(num_noted, firsts, scopes, width, group, at):
                num = _put_live(places, num, live, width, slot, prompt_slot, at, context, num_prompt, 1, rank, uses)
                rank += 1
            at = live.short[at]
    return num


@lean
def _put_live(
    places: Places, num: int, live: Chains, width: int, slot: int, prompt_slot: int, at: int, context: Int32Array,
    num_prompt: int, least: int, rank: int, uses: NDArray[np.bool_],
) -> int:  # fmt: skip
    """Notes the place behind live.tokens[at] where at least so many tokens agree."""
    if live.tokens[at + 1] == MARKER:
        return num
    owner = _owner_of(at, width)
    is_prompt = owner == prompt_slot
    source = OWN if is_prompt or owner == slot else SIBLINGS
    if not uses[source] or is_known(places, num, IN_LIVE, at + 1):
        return num
    length, edit = measure(live.tokens, at, context, 0 if is_prompt else num_prompt)
    if length < least:
        return num
    shift = 0 if source == OWN else shift_bucket(at - owner * width - (context.size - num_prompt))
    return int(put(places, num, source, IN_LIVE, at + 1, length, edit, shift, rank_bucket(rank), 0.0))


@lean
def find_in_other_groups(
    places: Places, num: int, live: Chains, num_noted: Int64Array, firsts: Int64Array, scopes: Int64Array, width: int,
    group: int, context: Int32Array, num_prompt: int,
) -> int:  # fmt: skip
    """Notes the newest places of other groups' rollouts and prompts that end in the context's last three tokens."""
    size = context.size
    if size - num_prompt < LONG:
        return num
    head = long_head(EVERYWHERE, context[size - 3], context[size - 2], context[size - 1], live.heads.size)
    at, rank = live.wide_heads[head], 0
    for _ in range(_MAX_WIDE_LOOKS):
        if at < 0 or rank == _MAX_WIDE:
            break
        is_elsewhere = scopes[_owner_of(at, width)] != group
        if is_elsewhere and _is_there(num_noted, firsts, width, at) and live.tokens[at + 1] != MARKER:
            length, edit = measure(live.tokens, at, context, num_prompt)
            if length >= LONG and not is_known(places, num, IN_LIVE, at + 1):
                num = put(places, num, OTHERS, IN_LIVE, at + 1, length, edit, FAR, rank_bucket(rank), 0.0)
                rank += 1
        at = live.wide[at]
    return num


@lean
def _is_of_group(
    num_noted: Int64Array, firsts: Int64Array, scopes: Int64Array, width: int, group: int, at: int
) -> bool:
    """Whether a place is in a text of the group: a link may lead to another group's."""
    return bool(scopes[_owner_of(at, width)] == group and _is_there(num_noted, firsts, width, at))


@lean
def _is_there(num_noted: Int64Array, firsts: Int64Array, width: int, at: int) -> bool:
    """Whether a place is in what its slot holds: a link may lead to what was written over."""
    owner = _owner_of(at, width)
    return bool(at <= owner * width + num_noted[owner] - firsts[owner])


@lean
def _owner_of(at: int, width: int) -> int:
    """The slot that a place stands in: divided without signs, which takes half as long."""
    return int(np.uint32(at) // np.uint32(width))
