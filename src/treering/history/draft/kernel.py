"""Drafts for all rows in one compiled call without the interpreter lock.

For each row: find matches, grow a tree of their continuations; then keep the tokens of the batch that pay.

    B rows   M matches
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Float64Array, Int64Array, UInt8Array
from treering.compiling.lean import kernel, lean
from treering.history.draft.candidates import Texts, weigh
from treering.history.draft.output import BINS, Output, cut, write_row
from treering.history.draft.tree import Model, Row, grow
from treering.history.draft.workspace import WORKSPACE, Workspace
from treering.history.features import NO_DRAFT
from treering.history.jit import STAMP, Memory
from treering.history.match.matches import MATCH, MAX_MATCHES, Matches
from treering.history.match.published import Histories, Others
from treering.history.match.running import Running, note_rows
from treering.history.match.running_rows import RowStates, copy_state
from treering.history.match.sources import Rows, find_matches, is_due
from treering.history.match.suffix_search import BATCHED_SEARCH, MAX_QUERIES

ROWS_PER_PROBE = 64
"""Rows with matches but no draft until one of them is drafted one token all the same, as a probe."""
_PROBE_PROBABILITY = 0.99


class Budget(NamedTuple):
    """How many tokens may be drafted; costs of size 0 keep every drafted token."""

    max_draft: int  # of a row
    least: float  # see `tree.Row`
    rise: float
    cost_sizes: Int64Array
    cost_seconds: Float64Array


class Found(NamedTuple):
    """The matches of some rows."""

    matches: Matches  # MATCH [MAX_QUERIES, M]
    num_matches: Int64Array  # [MAX_QUERIES]


FOUND = Memory(Found, matches=(MATCH, (MAX_QUERIES, MAX_MATCHES)), num_matches=(np.int64, MAX_QUERIES))
_SEARCH_AT = WORKSPACE.num_bytes
_FOUND_AT = _SEARCH_AT + BATCHED_SEARCH.num_bytes
_BINS_AT = _FOUND_AT + FOUND.num_bytes
NUM_SCRATCH_BYTES = _BINS_AT + BINS.num_bytes
"""Bytes that the rows of a call share, one row or stage after another."""
# Within compiled calls.
_workspace, _search, _found, _bins = WORKSPACE.arrays, BATCHED_SEARCH.arrays, FOUND.arrays, BINS.arrays


@lean
def _first_bad_row(rows: Rows) -> int:
    for b in range(rows.num_tokens.size):
        leader, fits = rows.leaders[b], 0 <= rows.num_prompt[b] <= rows.num_tokens[b] <= rows.tokens.shape[1]
        fits = fits and 0 <= leader <= b and rows.leaders[leader] == leader
        if not fits or rows.max_drafts[b] < 0 or rows.num_tokens[leader] != rows.num_tokens[b]:
            return b
    return -1


@lean
def _draft(
    rows: Rows, b: int, texts: Texts, matches: Matches, num_matches: int, workspace: Workspace, state: int,
    model: Model, budget: Budget, num_undrafted: Int64Array, output: Output, at: int,
) -> int:  # fmt: skip
    """Writes a row's draft from its matches, after `at` tokens of other rows; returns how many tokens it has."""
    num_tokens = rows.num_tokens[b]
    weigh(matches, num_matches)
    last, before = rows.tokens[b, num_tokens - 1], rows.tokens[b, num_tokens - 2] if num_tokens > 1 else -1
    row = Row(state, last, before, min(budget.max_draft, rows.max_drafts[b]), budget.least, budget.rise)
    grown: tuple[int, int] = grow(texts, matches, workspace, num_matches, model, row)
    num_nodes, num_made = grown
    if num_nodes == 0 and num_matches > 0:
        if num_undrafted[0] < ROWS_PER_PROBE or num_made == 1:
            num_undrafted[0] += 1
            return 0
        # Without probes, what looks too poor to be drafted would never be observed, and would look poor for ever.
        num_undrafted[0], num_nodes, output.is_probe[b] = 0, 1, True
        nodes, likeliest = workspace.nodes, 1
        for line in range(2, num_made):
            if nodes[np.uintp(line)].path > nodes[np.uintp(likeliest)].path:
                likeliest = line
        workspace.taken[0], nodes[likeliest].path = likeliest, _PROBE_PROBABILITY
    write_row(output, at, workspace, num_nodes)
    return num_nodes


@lean
def _draft_all(
    rows: Rows, history: Histories, running: Running, others: Others, states: RowStates, enabled: BoolArray,
    model: Model, budget: Budget, num_undrafted: Int64Array, output: Output, scratch: UInt8Array,
) -> int:  # fmt: skip
    """Writes the drafts of all rows; returns how many tokens they have."""
    workspace, search = _workspace(scratch, 0), _search(scratch, _SEARCH_AT)
    matches, num_matches = _found(scratch, _FOUND_AT)
    texts = Texts(history.text, running.chains.tokens, others.text)
    num_out, num_rows = 0, rows.num_tokens.size
    output.offsets[0] = 0
    # Each stage for some rows before the next stage: all code would have to be fetched again for every row.
    for first in range(0, num_rows, MAX_QUERIES):
        end = min(first + MAX_QUERIES, num_rows)
        find_matches(rows, first, end, history, running, others, states, enabled, matches, num_matches, search)
        for b in range(first, end):
            if is_due(rows, b):
                state, k = states.state[running.slots[b]], b - first
                num_out += _draft(
                    rows, b, texts, matches[k], num_matches[k], workspace, state, model, budget, num_undrafted, output,
                    num_out,
                )  # fmt: skip
            output.offsets[b + 1] = num_out
    return num_out


@lean
def _note_undrafted(rows: Rows, running: Running, states: RowStates, num_undrafted: Int64Array, output: Output) -> None:
    """Notes which rows have no draft; a probe that was cut stays due. Duplicate rows get their leaders' states."""
    for b in range(rows.num_tokens.size):
        if output.offsets[b + 1] > output.offsets[b]:
            continue
        slot = running.slots[b]
        states.state[slot], states.num_expected[slot] = NO_DRAFT, rows.num_tokens[b] + 1
        if output.is_probe[b]:
            num_undrafted[0] = ROWS_PER_PROBE
    for b in range(rows.num_tokens.size):
        if rows.leaders[b] != b:
            copy_state(states, running.slots[b], running.slots[rows.leaders[b]])


def _compile(stamp: int) -> Callable[..., tuple[int, float, int]]:
    """The compiled call, cached by its sources; see `jit.STAMP`."""

    @kernel
    def propose(
        rows: Rows,
        history: Histories,
        running: Running,
        others: Others,
        states: RowStates,
        enabled: BoolArray,
        model: Model,
        budget: Budget,
        num_undrafted: Int64Array,
        output: Output,
        scratch: UInt8Array,
    ) -> tuple[int, float, int]:
        """Fills the output; the `NUM_SCRATCH_BYTES` of the scratch may hold anything.

        Returns:
            The first row whose counts contradict each other, or -1; what `cut` returns; the tokens before the cut.
        """
        assert stamp >= 0
        bad_row: int = _first_bad_row(rows)
        if bad_row >= 0:
            return bad_row, 0.0, 0
        note_rows(running, rows.groups, rows.tokens, rows.num_tokens, rows.num_prompt)
        num_out = _draft_all(
            rows, history, running, others, states, enabled, model, budget, num_undrafted, output, scratch
        )
        cutoff = 0.0
        if budget.cost_sizes.size > 0 and num_out > 0:
            cutoff = cut(rows.worth, output, budget.cost_sizes, budget.cost_seconds, _bins(scratch, _BINS_AT))
        _note_undrafted(rows, running, states, num_undrafted, output)
        return -1, cutoff, num_out

    compiled: Callable[..., tuple[int, float, int]] = propose
    return compiled


propose = _compile(STAMP)
