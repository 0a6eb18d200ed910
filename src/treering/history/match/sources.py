"""Searches the sources for matches of some rows, one source after another, until a row's matches are long enough.

B rows   L columns
"""

from typing import NamedTuple

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.history.features import HISTORY, OTHERS, OWN, SIBLINGS
from treering.history.match.arena import Histories
from treering.history.match.batched_search import BatchedSearch, add_history_query, add_query, run_queries
from treering.history.match.history_matches import find_in_history, find_in_others
from treering.history.match.matches import Matches, longest_of
from treering.history.match.recent import Others
from treering.history.match.row_states import RowStates, update_state
from treering.history.match.running import Running
from treering.history.match.running_matches import find_in_group, find_in_other_groups
from treering.lean import lean

_ENOUGH = 10
"""Length of a match from which on no further source is searched."""


class Rows(NamedTuple):
    """Contexts; see `DraftRows`."""

    tokens: Int32Array  # [B, L]
    num_tokens: Int64Array  # [B]
    num_prompt: Int64Array  # [B]
    groups: Int64Array  # [B]
    max_drafts: Int64Array  # [B]
    worth: Float64Array  # [B]
    leaders: Int64Array  # [B]
    prompts: Int64Array  # [B], slots of the arena
    own_spans: Int64Array  # [B, 2], where the row's own prompt begins and ends in the text of all prompts


@lean
def is_due(rows: Rows, b: int) -> bool:
    """Whether a row may get a draft."""
    return bool(rows.max_drafts[b] > 0 and rows.num_tokens[b] > 0 and rows.leaders[b] == b)


@lean
def find_matches(
    rows: Rows, first: int, end: int, history: Histories, running: Running, others: Others, states: RowStates,
    enabled: BoolArray, matches: Matches, num_matches: Int64Array, queries: BatchedSearch,
) -> None:  # fmt: skip
    """Writes the matches of the rows from `first` to before `end`, and their numbers."""
    num_matches[:] = 0
    if enabled[HISTORY]:
        _search_history(rows, first, end, history, matches, num_matches, queries)
    for b in range(first, end):
        if is_due(rows, b):
            k = b - first
            update_state(states, running.slots[b], rows.num_tokens[b])
            num_matches[k] = _find_running(rows, b, running, enabled, matches[k], num_matches[k])
    if enabled[OTHERS]:
        _search_others(rows, first, end, running, others, matches, num_matches, queries)


@lean
def _search_history(
    rows: Rows,
    first: int,
    end: int,
    history: Histories,
    matches: Matches,
    num_matches: Int64Array,
    queries: BatchedSearch,
) -> None:
    """Adds matches in the histories of the rows' prompts."""
    num = 0
    for b in range(first, end):
        if is_due(rows, b) and history.spans[rows.prompts[b], 1] > 0:
            add_history_query(
                queries, num, rows.tokens, b, rows.num_tokens[b], rows.num_prompt[b], history, rows.prompts[b]
            )
            num += 1
    run_queries(queries, num, rows.tokens, history.text, history.order, history.keys, history.positions)
    for q in range(num):
        b = queries.rows[q]
        num_matches[b - first] = find_in_history(
            matches[b - first], 0, history, rows.prompts[b], rows.tokens[b, : rows.num_tokens[b]],
            rows.num_prompt[b], queries.lows[q],
        )  # fmt: skip


@lean
def _find_running(rows: Rows, b: int, running: Running, enabled: BoolArray, matches: Matches, num: int) -> int:
    """Adds matches in the running rollouts of the row's group; returns the new number of matches."""
    if not (enabled[SIBLINGS] or enabled[OWN]) or longest_of(matches, num) >= _ENOUGH:
        return num
    context = rows.tokens[b, : rows.num_tokens[b]]
    found: int = find_in_group(
        matches, num, running, running.slots[b], running.prompt_slots[b], rows.groups[b], context, rows.num_prompt[b],
        enabled,
    )  # fmt: skip
    return found


@lean
def _search_others(
    rows: Rows, first: int, end: int, running: Running, others: Others, matches: Matches, num_matches: Int64Array,
    queries: BatchedSearch,
) -> None:  # fmt: skip
    """Adds matches in other groups' running rollouts and in other prompts' histories."""
    num = 0
    for b in range(first, end):
        if is_due(rows, b) and longest_of(matches[b - first], num_matches[b - first]) < _ENOUGH:
            add_query(queries, num, rows.tokens, b, rows.num_tokens[b], rows.num_prompt[b], 0, others.order.size, 0)
            num += 1
    run_queries(queries, num, rows.tokens, others.text, others.order, others.keys, others.text)
    for q in range(num):
        b = queries.rows[q]
        context, begin, own = rows.tokens[b, : rows.num_tokens[b]], rows.num_prompt[b], matches[b - first]
        so_far: int = find_in_other_groups(own, num_matches[b - first], running, rows.groups[b], context, begin)
        num_matches[b - first] = find_in_others(own, so_far, others, rows.own_spans[b], context, begin, queries.lows[q])
