"""Matches in running rollouts: those of the row's group, its prompt, the row itself, and other groups."""

import numpy as np

from treering.arrays import BoolArray, Int32Array
from treering.history.features import FAR, OTHERS, OWN, SIBLINGS, shift_bucket
from treering.history.match.hash_chains import EVERYWHERE, LONG, newest_of_three, newest_of_token
from treering.history.match.matches import IN_RUNNING, Matches, is_known, put
from treering.history.match.running import Running, is_in_text, owner_of
from treering.history.match.suffix_search import measure
from treering.history.store.prompt_index import MARKER
from treering.lean import lean

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
    shift = 0 if source == OWN else shift_bucket(at - running.begins[np.uintp(owner)] - (context.size - num_prompt))
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
