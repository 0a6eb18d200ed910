"""Places in the published rollouts of other prompts.

Knows one text of many prompts. Knows nothing of the row's own prompt but its number.
"""

import numpy as np
from numpy.typing import NDArray

from treering.history.features import OTHERS
from treering.history.index import MARKER
from treering.history.lean import lean
from treering.history.places import Places, put
from treering.history.prefetch import prefetch
from treering.history.recent import Others
from treering.history.search import LONG_ENOUGH, MAX_LENGTH, agree, agree_behind_edit, first_behind

Int32Array = NDArray[np.int32]

_MAX_OTHERS = 6


@lean
def find_in_others(places: Places, num: int, others: Others, owner: int, context: Int32Array, begin: int) -> int:
    """Notes the places of other prompts' rollouts whose contexts agree most with the row's, longest first."""
    text, order, owners = others.text, others.order, others.owners
    right = first_behind(text, order, others.keys, 0, context, begin)
    for k in range(max(right - _MAX_OTHERS, 0), min(right + _MAX_OTHERS, order.size)):
        prefetch(text, order[k])
        prefetch(owners, order[k])
    left = right - 1
    most, last = num + _MAX_OTHERS, context.size - 1
    left_length = right_length = -1
    for _ in range(2 * _MAX_OTHERS):
        if left_length < 0:
            left_length = agree(text, order[left], context, last, begin, MAX_LENGTH) if left >= 0 else 0
        if right_length < 0:
            right_length = agree(text, order[right], context, last, begin, MAX_LENGTH) if right < order.size else 0
        length = max(left_length, right_length)
        if num == most or length == 0:
            return num
        if left_length > right_length:
            at = order[left]
            left, left_length = left - 1, -1
        else:
            at = order[right]
            right, right_length = right + 1, -1
        if owners[at] == owner or text[at + 1] == MARKER:
            continue
        edit = 0
        if length < LONG_ENOUGH:
            edit = agree_behind_edit(text, at - length, context, last - length, begin)
        num = put(places, num, OTHERS, at + 1, length, edit, 5, 0, 0.0)
    return num
