"""What a step searches: which sources, their arrays, and one after another until a row's matches are long enough.

B rows   L columns   D drafted tokens
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.draft_types import DraftRows
from treering.history.features import HISTORY, OTHERS, OWN, SIBLINGS, sources_of
from treering.history.match.matches import Matches, longest_of
from treering.history.match.published import (
    Arena,
    BatchedSearch,
    Histories,
    Others,
    Recent,
    add_history_query,
    add_query,
    find_in_history,
    find_in_others,
    run_queries,
)
from treering.history.match.running import Running, find_in_group, find_in_other_groups
from treering.history.match.running_rows import RowChange, RowStates, RunningRows, update_state
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

_QUERY_S = 1.5e-6
"""Seconds that searching other prompts costs per row, whether the row needs it or not: 1.2 to 1.9 us on an EPYC (Zen 4)
if 3 of 4 rows search."""
_MIN_ROWS = 512
_NUM_SKIPPED = 15


class GainGate:
    """Lets every step do costly work while the work pays, and else one step in 16, until it pays again.

    The work pays if the tokens gained over recent rows save more time than it took.

    Args:
        counts: float64 [3], changed in place: rows of steps that did the work, tokens gained, and steps still to skip.
        price_s: seconds of work per row.

    Example: at 75 us a token and 1.5 us a row, the work pays from one token in 50 rows on. If nothing is gained and a
    step has 64 rows, 8 steps do it, then 15 do not, one does, 15 do not, and so on.
    """

    def __init__(self, counts: Float64Array, price_s: float) -> None:
        self._counts, self._price_s = counts, price_s
        self._is_due = False

    def is_due(self) -> bool:
        """Return whether this step does the work; call it once per step."""
        num_left = self._counts[2]
        self._is_due = bool(num_left == 0)
        self._counts[2] = max(num_left - 1, 0)
        return self._is_due

    def note(self, num_rows: int, num_gained: int, token_s: float) -> None:
        """Count the outcome of the latest step: its rows, tokens gained, and the seconds that a token saves."""
        if not self._is_due:
            return
        rows, gained = self._counts[0] + num_rows, self._counts[1] + num_gained
        share = 0.5 if rows >= 2 * _MIN_ROWS else 1.0
        self._counts[:2] = share * rows, share * gained
        if rows >= _MIN_ROWS and gained * token_s < rows * self._price_s:
            self._counts[2] = _NUM_SKIPPED


class SourceGate:
    """Decides which sources each step of a drafter searches: all that are enabled, other prompts only while they pay.

    An accepted token saves what a token takes without drafts: a row's share of a pass.

    Args:
        is_enabled: bool [sources], sources that may be searched.
        counts: float64 [3], `counts` of the `GainGate` for other prompts.

    Example: with history as the only source, other prompts are never searched.
    """

    def __init__(self, is_enabled: BoolArray, counts: Float64Array) -> None:
        self._is_enabled, self._others = is_enabled, GainGate(counts, _QUERY_S)

    def due(self) -> BoolArray:
        """Return the sources that this step searches, bool [sources]; call it once per step."""
        due, is_paying = self._is_enabled.copy(), self._others.is_due()
        due[OTHERS] &= is_paying
        return due

    def note(self, offsets: Int64Array, features: Int32Array, was_accepted: NDArray[np.int8], token_s: float) -> None:
        """Count the outcome of the latest step's drafts.

        Args:
            offsets: int64 [B + 1], offsets of the rows' drafts.
            features: int32 [D or more, kinds], see `features`.
            was_accepted: int8 [D]: 1, 0, or -1 if unknown.
            token_s: seconds that a token takes without drafts.
        """
        if not self._is_enabled[OTHERS]:
            return
        num_accepted = np.count_nonzero(sources_of(features[: was_accepted.size])[was_accepted == 1] == OTHERS)
        num_known = np.diff(np.concatenate([[0], np.cumsum(was_accepted >= 0)])[offsets])
        # A row without a draft always has a known outcome.
        num_rows = np.count_nonzero((num_known > 0) | (np.diff(offsets) == 0))
        self._others.note(int(num_rows), int(num_accepted), token_s)


_ENOUGH = 10
"""Matches of this length end the search in further sources."""


class Rows(NamedTuple):
    """Contexts of a step; see `DraftRows`."""

    tokens: Int32Array  # [B, L]
    num_tokens: Int64Array  # [B]
    num_prompt: Int64Array  # [B]
    groups: Int64Array  # [B]
    max_drafts: Int64Array  # [B]
    leaders: Int64Array  # [B]
    prompts: Int64Array  # [B], slots of the arena
    own_spans: Int64Array  # [B, 2], where the row's own prompt begins and ends in the text of all prompts


@lean
def is_due(rows: Rows, b: int) -> bool:
    """Return whether a row may get a draft."""
    return bool(rows.max_drafts[b] > 0 and rows.num_tokens[b] > 0 and rows.leaders[b] == b)


@lean
def find_matches(
    rows: Rows, first: int, end: int, history: Histories, running: Running, others: Others, states: RowStates,
    enabled: BoolArray, matches: Matches, num_matches: Int64Array, queries: BatchedSearch,
) -> None:  # fmt: skip
    """Write the matches of rows `first` to `end` (exclusive), and their numbers."""
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
    """Add matches in the running rollouts of the row's group; return the new number of matches."""
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


_ENTRIES_PER_STEP = 64
"""Reading other prompts' history takes 30 ms for 262,144 entries; once in as many steps, that is 7 us per step."""


class SearchState:
    """Arena, running rollouts and other prompts' history, for the rows of the latest step.

    Attributes:
        live: the running rollouts.
        live_slots: int64 [B], the slot of each row's rollout in `live`.
        prompt_slots: int64 [B], the slots of the rows' prompts in the arena.
        own_spans: int64 [B, 2], where each row's own prompt begins and ends in the text of other prompts.
        rows: rows of the latest step; None before the first one, and after `take` has failed.

    Example: while rows and snapshot stay the same, a step reads only the tokens appended since the last one.
    """

    def __init__(self, *, max_live_tokens: int, max_other_tokens: int) -> None:
        """Limit the tokens kept of each running rollout or prompt, and of other prompts' history."""
        self._arena = Arena()
        self._recent = Recent(max_other_tokens)
        self._max_live_tokens = max_live_tokens
        self.prompt_slots, self.own_spans = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        self._num_steps = 0
        self.forget()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.num_bytes for part in (self._arena, self.live, self._recent))

    @property
    def history(self) -> Histories:
        """Histories of the rows' prompts."""
        return self._arena.arrays

    @property
    def others(self) -> Others:
        """Histories of other prompts."""
        return self._recent.arrays

    def forget(self) -> None:
        """Clear the state, so that later matches do not depend on earlier rows."""
        self.live = RunningRows(self._max_live_tokens)
        self.live_slots = np.zeros(0, np.int64)
        self.rows: DraftRows | None = None
        self._snapshot: Mapping[PromptId, PromptIndex] | None = None

    def take(self, rows: DraftRows, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        """Set the rows of the step; cheap if they are the same as in the previous step.

        Raises:
            InputError: counts of a row contradict each other, or a text exceeds `MAX_ENTRIES`.
        """
        is_read = self.rows is not None and snapshot is self._snapshot
        # If the rest fails, the rows are unknown.
        self.rows = None
        self._num_steps += 1
        self.live_slots, change = self.live.slots(rows)
        if change != "none" or not is_read:
            self._read(rows, snapshot, change)
        self.rows, self._snapshot = rows, snapshot

    def _read(self, rows: DraftRows, snapshot: Mapping[PromptId, PromptIndex], change: RowChange) -> None:
        if change == "all":
            self._arena.forget()
        # In a batch that never empties, some rows always stay.
        if change == "all" or self._num_steps * _ENTRIES_PER_STEP >= self._recent.text.size:
            self._recent.take(snapshot)
            self._num_steps = 0
        self.prompt_slots = self._arena.slots(rows.prompt_ids, snapshot)
        self.own_spans = self._recent.spans(rows.prompt_ids)
