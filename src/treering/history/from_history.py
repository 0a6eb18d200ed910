"""Places in the published rollouts of a row's own prompt.

Knows an arena's indexes. Knows nothing of running rows and of other prompts.
"""

import numpy as np
from numpy.typing import NDArray

from treering.history.arena import NOTE_BITS, Histories, keys_of, order_of
from treering.history.features import HISTORY, shift_bucket
from treering.history.index import MARKER
from treering.history.lean import lean
from treering.history.places import Places, is_known, longest_of, put
from treering.history.prefetch import prefetch
from treering.history.search import LONG_ENOUGH, MAX_EDIT, agree, first_behind, measure

Int32Array = NDArray[np.int32]

NEAR = 8
"""Matches of this length are no edit away from anything better."""
LEAST_EDIT = 3
_MAX_PLACES = 12
_FEW_PLACES = 8
_MAX_LOOKS = 48
_WEAK, _ENOUGH_STRONG = 3, 4
"""Places that agree in less than a third of the longest are left out where four others speak."""
_NUM_EDITED = 2


@lean
def find_in_history(places: Places, num: int, history: Histories, slot: int, context: Int32Array, begin: int) -> int:
    """Notes the places of a prompt's index whose contexts agree most with the row's, longest first.

    Args:
        places: filled from `num` on.
        num: places so far.
        history: of the running prompts.
        slot: of the row's prompt.
        context: int32 [n], the row's tokens.
        begin: where the rollout begins.

    Returns:
        The number of places.
    """
    start, size = history.spans[slot]
    if size == 0:
        return num
    text, order, keys = history.text, order_of(history, slot), keys_of(history, slot)
    right = first_behind(text, order, keys, start, context, begin)
    for k in range(max(right - _FEW_PLACES, 0), min(right + _FEW_PLACES, size)):
        prefetch(text, start + order[k])
        prefetch(history.about, start + order[k])
    left = right - 1
    first, most = num, num + _MAX_PLACES
    left_length = left_edit = right_length = right_edit = -1
    longest = 0
    for _ in range(_MAX_LOOKS):
        if left_length < 0:
            left_length, left_edit = measure(text, start + order[left], context, begin) if left >= 0 else (0, 0)
        if right_length < 0:
            right_length, right_edit = measure(text, start + order[right], context, begin) if right < size else (0, 0)
        length = max(left_length, right_length)
        longest = max(longest, length)
        if length >= LONG_ENOUGH:
            most = first + _FEW_PLACES
        if num >= most or length == 0 or (_WEAK * length < longest and num >= first + _ENOUGH_STRONG):
            break
        if left_length > right_length:
            num = put_history(places, num, history, start + order[left], context, begin, left_length, left_edit)
            left, left_length = left - 1, -1
        else:
            num = put_history(places, num, history, start + order[right], context, begin, right_length, right_edit)
            right, right_length = right + 1, -1
    if longest_of(places, num) < NEAR:
        num = _find_edited(places, num, history, slot, context, begin)
    return num


@lean
def _find_edited(places: Places, num: int, history: Histories, slot: int, context: Int32Array, begin: int) -> int:
    """Notes where rollouts go on that agreed up to the token before the last, as if it were added or replaced."""
    if context.size - begin < LEAST_EDIT:
        return num
    start, size = history.spans[slot]
    text, order, keys = history.text, order_of(history, slot), keys_of(history, slot)
    shorter = context[: context.size - 1]
    right = first_behind(text, order, keys, start, shorter, begin)
    for k in range(max(right - _NUM_EDITED, 0), min(right + _NUM_EDITED, size)):
        at = start + order[k]
        edit = agree(text, at, context, shorter.size - 1, begin, MAX_EDIT)
        if edit < LEAST_EDIT or text[at + 1] == MARKER or text[at + 1] == context[shorter.size]:
            continue
        for behind in (at, at + 1):
            if not is_known(places, num, HISTORY, behind + 1):
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
    return int(put(places, num, HISTORY, at + 1, length, edit, shift, said & ((1 << NOTE_BITS) - 1), reward))
