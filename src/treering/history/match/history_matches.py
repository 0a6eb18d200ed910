"""Matches in published rollouts: those of a row's own prompt, and those of other prompts."""

from treering.arrays import Int32Array, Int64Array
from treering.history.features import FAR, HISTORY, OTHERS, shift_bucket
from treering.history.match.arena import Histories
from treering.history.match.matches import IN_HISTORY, IN_OTHERS, Matches, put
from treering.history.match.recent import Others
from treering.history.match.sides import next_match, sides_of
from treering.history.match.suffix_search import LONG_ENOUGH, agree_after_edit, with_edit
from treering.history.store.prompt_index import MARKER
from treering.lean import lean

_MAX_MATCHES = 12
_FEW_MATCHES = 8
_MAX_LOOKS = 48
_MAX_OTHERS = 6
_WEAK, _ENOUGH_STRONG = 3, 4
"""Matches shorter than a third of the longest are left out once there are four."""


@lean
def find_in_history(
    matches: Matches, num: int, history: Histories, slot: int, context: Int32Array, begin: int, right: int
) -> int:
    """Adds the longest matches of the row's context in its prompt's index, longest first.

    Args:
        matches: written from `num` on.
        num: matches so far.
        history: of the running prompts.
        slot: of the row's prompt.
        context: int32 [n], the row's tokens.
        begin: where the rollout begins.
        right: positions of the index that sort before the context.

    Returns:
        The number of matches.
    """
    start, size = history.spans[slot]
    if size == 0:
        return num
    text, order = history.text, history.order[start : start + size]
    sides = sides_of(right)
    first, most, longest = num, num + _MAX_MATCHES, 0
    for _ in range(_MAX_LOOKS):
        at, num_equal, sides = next_match(sides, text, order, start, context, begin)
        if num_equal == 0:
            break
        length, edit = with_edit(text, at, context, begin, num_equal)
        longest = max(longest, length)
        if length >= LONG_ENOUGH:
            most = first + _FEW_MATCHES
        if num >= most or (_WEAK * length < longest and num >= first + _ENOUGH_STRONG):
            break
        num = _put_history(matches, num, history, at, context, begin, length, edit)
    return num


@lean
def _put_history(
    matches: Matches, num: int, history: Histories, at: int, context: Int32Array, begin: int, length: int, edit: int
) -> int:
    """Adds the match that ends at text[at], unless the rollout ends there."""
    if history.text[at + 1] == MARKER:
        return num
    shift = shift_bucket(history.positions[at] - (context.size - begin))
    return int(put(matches, num, HISTORY, IN_HISTORY, at + 1, length, edit, shift))


@lean
def find_in_others(
    matches: Matches, num: int, others: Others, own: Int64Array, context: Int32Array, begin: int, right: int
) -> int:
    """Adds the longest matches of the row's context in other prompts' rollouts, longest first.

    The row's own prompt spans `own[0]` to `own[1]`; `right` positions sort before the context.
    """
    text, order = others.text, others.order
    own_begin, own_end = own[0], own[1]
    sides = sides_of(right)
    most, last = num + _MAX_OTHERS, context.size - 1
    for _ in range(2 * _MAX_OTHERS):
        at, length, sides = next_match(sides, text, order, 0, context, begin)
        if num == most or length == 0:
            break
        if own_begin <= at < own_end or text[at + 1] == MARKER:
            continue
        edit = 0
        if length < LONG_ENOUGH:
            edit = agree_after_edit(text, at - length, context, last - length, begin)
        num = put(matches, num, OTHERS, IN_OTHERS, at + 1, length, edit, FAR)
    return num
