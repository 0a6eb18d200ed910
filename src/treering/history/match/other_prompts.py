"""Matches in the published rollouts of other prompts."""

from treering.arrays import Int32Array, Int64Array
from treering.history.features import FAR, OTHERS
from treering.history.jit import lean
from treering.history.match.matches import IN_OTHERS, Matches, put
from treering.history.match.recent import Others
from treering.history.match.sides import next_match, sides_of
from treering.history.match.suffix_search import LONG_ENOUGH, agree_after_edit
from treering.history.store.prompt_index import MARKER

_MAX_OTHERS = 6


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
