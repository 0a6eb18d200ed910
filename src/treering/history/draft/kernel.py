"""Drafts of all rows in one compiled call without the interpreter lock.

Knows the order of a row's work: note what is new, find places, grow a tree; and then which tokens of the batch pay.
Knows nothing of prompts, stores and records.

    B rows   L columns   S live slots   D drafted tokens
"""

from collections.abc import Callable

import numpy as np
from numba import njit

from treering.arrays import BoolArray, Float32Array, Float64Array, Int16Array, Int32Array, Int64Array
from treering.history.draft.candidates import Texts, Votes, weigh
from treering.history.draft.output import Output, cut, write_row
from treering.history.draft.tree import Model, Row, grow
from treering.history.draft.workspace import Workspace, make_workspace
from treering.history.features import NO_DRAFT
from treering.history.jit import STAMP, lean
from treering.history.match.alignment import Threads, go_along
from treering.history.match.arena import Histories
from treering.history.match.batched_search import NUM_AHEAD, BatchedSearch, make_batched_search
from treering.history.match.hash_chains import HashChains
from treering.history.match.matches import Places, longest_of, make_places
from treering.history.match.recent import Others
from treering.history.match.running import Running, note_rows
from treering.history.match.sources import Rows, find_places, is_due
from treering.history.types import fits_line

ROWS_PER_PROBE = 64
"""Rows with places and without a draft until one of them gets a draft of one token all the same."""
_PROBE_WORTH = 0.99


@lean
def _first_bad_row(rows: Rows) -> int:
    for b in range(rows.num_tokens.size):
        leader, fits = rows.leaders[b], fits_line(rows.num_prompt[b], rows.num_tokens[b], rows.tokens.shape[1])
        fits = fits and 0 <= leader <= b and rows.leaders[leader] == leader
        if not fits or rows.max_drafts[b] < 0 or rows.num_tokens[leader] != rows.num_tokens[b]:
            return b
    return -1


@lean
def _draft(
    rows: Rows, b: int, texts: Texts, places: Places, room: Workspace, num_places: int, state: int, model: Model,
    most: int, least: float, rise: float, quiet: Int64Array, output: Output, at: int,
) -> int:  # fmt: skip
    """Writes the draft of a row from its places, behind `at` others; returns how many tokens it has."""
    num_tokens = rows.num_tokens[b]
    weigh(places, num_places, model.votes, model.policy, longest_of(places, num_places))
    last, before = rows.tokens[b, num_tokens - 1], rows.tokens[b, num_tokens - 2] if num_tokens > 1 else -1
    row = Row(state, last, before, most, least, rise)
    while True:
        num_nodes: int = grow(texts, places, room, num_places, model, row)
        if num_nodes > 0 or num_places == 0:
            break
        if quiet[0] < ROWS_PER_PROBE:
            quiet[0] += 1
            return 0
        # What looks too poor to be drafted is never observed, and would look poor for ever.
        quiet[0] = 0
        row = Row(state, last, before, 1, 0.0, 0.0)
    if row.least == 0:
        output.is_probe[b] = True
        room.buds[room.nodes[0]].path = _PROBE_WORTH
    write_row(output, at, room, num_nodes)
    return num_nodes


@lean
def _draft_all(
    rows: Rows, history: Histories, generation: int, running: Running, others: Others, threads: Threads,
    uses: BoolArray, model: Model, max_draft: int, least: float, rise: float, quiet: Int64Array, output: Output,
    room: Workspace, ahead: BatchedSearch, places: Places, num_places: Int64Array,
) -> int:  # fmt: skip
    """Writes the drafts of all rows; returns how many tokens they have."""
    texts = Texts(history.text, running.chains.tokens, others.text)
    num_out, num_rows = 0, rows.num_tokens.size
    output.offsets[0] = 0
    # Each stage for some rows before the next one: all of the code would have to be fetched again for every row.
    for first in range(0, num_rows, NUM_AHEAD):
        behind = min(first + NUM_AHEAD, num_rows)
        find_places(
            rows, first, behind, history, generation, running, others, threads, uses, places, num_places, ahead
        )  # fmt: skip
        for b in range(first, behind):
            if is_due(rows, b):
                state, most = threads.state[running.slots[b]], min(max_draft, rows.max_drafts[b])
                num_out += _draft(
                    rows, b, texts, places[b - first], room, num_places[b - first], state, model, most,
                    least, rise, quiet, output, num_out,
                )  # fmt: skip
            output.offsets[b + 1] = num_out
    return num_out


@lean
def _note_undrafted(rows: Rows, running: Running, threads: Threads, quiet: Int64Array, output: Output) -> None:
    """Notes which rows get nothing; a probe that was not worth its pass is still due. Led rows are as their leaders."""
    for b in range(rows.num_tokens.size):
        if output.offsets[b + 1] > output.offsets[b]:
            continue
        slot = running.slots[b]
        threads.state[slot], threads.num_expected[slot] = NO_DRAFT, rows.num_tokens[b] + 1
        if output.is_probe[b]:
            quiet[0] = ROWS_PER_PROBE
    for b in range(rows.num_tokens.size):
        if rows.leaders[b] != b:
            go_along(threads, running.slots[b], running.slots[rows.leaders[b]])


def _compile(stamp: int) -> Callable[..., tuple[int, float, int]]:
    """The compiled call, cached by its sources; see `stamp`."""

    @njit(cache=True, nogil=True, error_model="numpy")
    def propose(
        tokens: Int32Array, num_tokens: Int64Array, num_prompt: Int64Array, groups: Int64Array, max_drafts: Int64Array,
        worth: Float64Array, leaders: Int64Array, prompts: Int64Array, own_spans: Int64Array,
        spans: Int64Array, text: Int32Array, order: Int32Array, keys: Int64Array, about: Int32Array,
        rewards: Float32Array, generation: int,
        live_tokens: Int32Array, live_short: Int32Array, live_long: Int32Array, live_wide: Int32Array,
        live_short_heads: Int32Array, live_long_heads: Int32Array, live_wide_heads: Int32Array,
        num_noted: Int64Array, first: Int64Array, scopes: Int64Array, begins: Int64Array, sizes: Int64Array,
        owners: Int32Array, live_slots: Int64Array, prompt_slots: Int64Array,
        other_text: Int32Array, other_order: Int32Array, other_keys: Int64Array,
        thread_at: Int32Array, thread_missed: Int32Array, thread_tokens: Int64Array, thread_expected: Int64Array,
        thread_generation: Int64Array, state: Int64Array,
        uses: BoolArray, policy: int, is_chain: bool, max_draft: int, least: float, rise: float,
        vote_length: Float64Array, vote_edit: Float64Array, vote_age: Float64Array, vote_shift: Float64Array,
        vote_none: Float64Array, weights: Float32Array, token_weights: Int16Array,
        quiet: Int64Array, cost_sizes: Int64Array, cost_seconds: Float64Array,
        out_offsets: Int64Array, out_tokens: Int32Array, out_parents: Int32Array, out_estimates: Float32Array,
        out_paths: Float64Array, out_shares: Float32Array, out_features: Int32Array,
    ) -> tuple[int, float, int]:  # fmt: skip
        """Fills the output; returns -1 or the first row whose counts contradict, what `cut` does, and tokens before it.

        The arguments are the fields of the records above, flat because the compiled call unpacks arrays much faster
        than tuples of them. Costs of size 0 leave every drafted token in.
        """
        assert stamp >= 0
        rows = Rows(
            tokens, num_tokens, num_prompt, groups, max_drafts, worth, leaders,
            prompts, own_spans,
        )  # fmt: skip
        bad_row: int = _first_bad_row(rows)
        if bad_row >= 0:
            return bad_row, 0.0, 0
        history = Histories(spans, text, order, keys, about, rewards)
        chains = HashChains(
            live_tokens, live_short, live_long, live_wide, live_short_heads, live_long_heads, live_wide_heads
        )
        running = Running(
            chains, num_noted, first, scopes, begins, sizes, owners, live_slots, prompt_slots,
        )  # fmt: skip
        others = Others(other_text, other_order, other_keys)
        threads = Threads(thread_at, thread_missed, thread_tokens, thread_expected, thread_generation, state)
        votes = Votes(vote_length, vote_edit, vote_age, vote_shift, vote_none)
        output = Output(
            out_offsets, out_tokens, out_parents, out_estimates, out_paths,
            out_shares, out_features, np.zeros(num_tokens.size, np.bool_),
        )  # fmt: skip
        note_rows(running, rows.groups, rows.tokens, rows.num_tokens, rows.num_prompt)
        num_out = _draft_all(
            rows, history, generation, running, others, threads, uses,
            Model(votes, weights, token_weights, policy, is_chain), max_draft, least, rise, quiet, output,
            make_workspace(), make_batched_search(), make_places(NUM_AHEAD), np.zeros(NUM_AHEAD, np.int64),
        )  # fmt: skip
        cutoff = 0.0
        if cost_sizes.size > 0 and num_out > 0:
            cutoff = cut(rows.worth, output, cost_sizes, cost_seconds)
        _note_undrafted(rows, running, threads, quiet, output)
        return -1, cutoff, num_out

    compiled: Callable[..., tuple[int, float, int]] = propose
    return compiled


propose = _compile(STAMP)
