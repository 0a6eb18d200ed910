"""Places in the published rollouts of a row's own prompt.

Knows an arena's indexes. Knows nothing of running rows and of other prompts.
"""

from treering.arrays import Int32Array
from treering.history.features import HISTORY, shift_bucket
from treering.history.jit import lean
from treering.history.match.arena import NOTE_BITS, Histories, order_of
from treering.history.match.matches import IN_HISTORY, Places, is_known, put
from treering.history.match.sides import next_place, sides_of
from treering.history.match.suffix_search import LONG_ENOUGH, MAX_EDIT, agree, with_edit
from treering.history.store.prompt_index import MARKER

LEAST_EDIT = 3
"""Tokens that agree behind an edit from which on a place without a match counts."""
NEAR = 8
"""Matches of this length are no edit away from anything better."""
_MAX_PLACES = 12
_FEW_PLACES = 8
_MAX_LOOKS = 48
_WEAK, _ENOUGH_STRONG = 3, 4
"""Places that agree in less than a third of the longest are left out where four others speak."""
_NUM_EDITED = 2


@lean
def find_in_history(
    places: Places, num: int, history: Histories, slot: int, context: Int32Array, begin: int, right: int
) -> int:
    """Notes the places of a prompt's index whose contexts agree most with the row's, longest first.

    Args:
        places: filled from `num` on.
        num: places so far.
        history: of the running prompts.
        slot: of the row's prompt.
        context: int32 [n], the row's tokens.
        begin: where the rollout begins.
        right: places of the index that stand before the context.

    Returns:
        The number of places.
    """
    start, size = history.spans[slot]
    if size == 0:
        return num
    text, order = history.text, order_of(history, slot)
    sides = sides_of(right)
    first, most, longest = num, num + _MAX_PLACES, 0
    for _ in range(_MAX_LOOKS):
        at, num_equal, sides = next_place(sides, text, order, start, context, begin)
        if num_equal == 0:
            break
        length, edit = with_edit(text, at, context, begin, num_equal)
        longest = max(longest, length)
        if length >= LONG_ENOUGH:
            most = first + _FEW_PLACES
        if num >= most or (_WEAK * length < longest and num >= first + _ENOUGH_STRONG):
            break
        num = put_history(places, num, history, at, context, begin, length, edit)
    return num


@lean
def find_edited(
    places: Places, num: int, history: Histories, slot: int, context: Int32Array, begin: int, right: int
) -> int:
    """Notes where rollouts go on that agreed up to the token before the last, as if it were added or replaced.

    So many places of the index stand before the context without its last token.
    """
    start, size = history.spans[slot]
    text, order = history.text, order_of(history, slot)
    shorter = context[: context.size - 1]
    for k in range(max(right - _NUM_EDITED, 0), min(right + _NUM_EDITED, size)):
        at = start + order[k]
        edit = agree(text, at, context, shorter.size - 1, begin, MAX_EDIT)
        if edit < LEAST_EDIT or text[at + 1] == MARKER or text[at + 1] == context[shorter.size]:
            continue
        for behind in (at, at + 1):
            if not is_known(places, num, IN_HISTORY, behind + 1):
                num = put_history(places, num, history, behind, context, begin, 0, edit)
    return num


@lean
def put_history(
    places: Places, num: int, history: Histories, at: int, context: Int32Array, begin: int, length: int, edit: int
) -> int:
    """Notes the place behind text[at], unless the rollout ends there."""
    if history.text[at + 1] == MARKER:
        return num
    said = history.about[at]
    shift = shift_bucket((said >> NOTE_BITS) - (context.size - begin))
    reward = history.rewards[at] if history.rewards.size > 0 else 0.0
    note = said & ((1 << NOTE_BITS) - 1)
    return int(put(places, num, HISTORY, IN_HISTORY, at + 1, length, edit, shift, note, reward))
