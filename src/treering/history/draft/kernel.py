"""Drafts for all rows in one compiled call without the interpreter lock.

The call finds each row's matches, grows a tree of their continuations, then keeps the tokens of the batch that pay.

    B rows   M matches   D drafted tokens
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array, UInt8Array
from treering.compiling.lean import lean
from treering.history.budget import NUM_BINS, bin_of, choose_bins
from treering.history.draft.tree import MAX_NODES, WORKSPACE, Model, Row, Texts, Workspace, grow, weigh
from treering.history.draft.worth import Value, note_gains, shape_of_lengths, weigh_rows
from treering.history.features import NO_DRAFT, NUM_KINDS, NUM_VOTES
from treering.history.jit import Memory, copy_entries, stamped
from treering.history.match.matches import MATCH, MAX_MATCHES, Matches
from treering.history.match.published import BATCHED_SEARCH, MAX_QUERIES, Histories, Others
from treering.history.match.running import Running, note_rows
from treering.history.match.running_rows import RowStates, copy_state
from treering.history.match.sources import Rows, find_matches, is_due


class Output(NamedTuple):
    """Drafts of all rows, one after another; see `Drafts`."""

    offsets: Int64Array  # [B + 1]
    tokens: Int32Array  # [D]
    parents: Int32Array  # [D]
    estimates: Float32Array  # [D]
    paths: Float64Array  # [D]
    shares: Float32Array  # [D, votes]
    features: Int32Array  # [D, kinds]
    is_probe: BoolArray  # [B], rows whose only token is drafted despite a too low estimate


@lean
def write_row(output: Output, at: int, workspace: Workspace, num_nodes: int) -> None:
    """Write a row's nodes from `at` on, each node's likeliest child right after it."""
    nodes, taken, numbers = workspace.nodes, workspace.taken, workspace.numbers
    _preorder(workspace, num_nodes)
    for index in range(num_nodes):
        node, k = nodes[np.uintp(taken[index])], np.uintp(at + numbers[index + 1])
        output.tokens[k], output.estimates[k], output.paths[k] = node.token, node.estimate, node.path
        output.parents[k] = numbers[node.parent + 1]
        copy_entries(output.shares, k, node.shares, NUM_VOTES)
        copy_entries(output.features, k, node.features, NUM_KINDS)


@lean
def _preorder(workspace: Workspace, num_nodes: int) -> None:
    """Number the nodes so that each node's likeliest child comes right after it; line 0 is the context, number -1.

    Nodes are in order of falling probability, so a node's first child is its likeliest.
    """
    nodes, taken, numbers, sizes, free = (
        workspace.nodes,
        workspace.taken,
        workspace.numbers,
        workspace.sizes,
        workspace.free,
    )
    for index in range(num_nodes):
        sizes[np.uintp(index + 1)] = 1
    for index in range(num_nodes - 1, -1, -1):
        sizes[np.uintp(nodes[np.uintp(taken[index])].parent + 1)] += sizes[np.uintp(index + 1)]
    numbers[0], free[0] = -1, 0
    for index in range(num_nodes):
        line = np.uintp(nodes[np.uintp(taken[index])].parent + 1)
        numbers[index + 1] = free[line]
        free[index + 1] = free[line] + 1
        free[line] += sizes[index + 1]


class Bins(NamedTuple):
    """Scratch arrays of `cut`."""

    counts: Float64Array  # [bins], drafted tokens
    gains: Float64Array  # [bins], sums of their probabilities, times their rows' worth
    renamed: Int32Array  # [nodes], new index of each of a row's tokens


BINS = Memory(Bins, counts=(np.float64, NUM_BINS), gains=(np.float64, NUM_BINS), renamed=(np.int32, MAX_NODES))


@lean
def cut(worth: Float64Array, output: Output, sizes: Int64Array, seconds: Float64Array, bins: Bins) -> float:
    """Drop drafted tokens that do not pay.

    Rows worth 0 are duplicates: they have no draft and no token in a pass.

    Returns:
        The lowest path probability kept, without probes; 0.0 if nothing was dropped or nothing was kept, because the
        cutoff is unknown then.
    """
    counts, gains, renamed = bins
    for k in range(NUM_BINS):
        counts[k] = gains[k] = 0.0
    num_computed, most = 0, 1.0
    for b in range(worth.size):
        num_computed += worth[b] > 0
        most = max(most, worth[b])
    for b in range(worth.size):
        for i in range(output.offsets[b], output.offsets[b + 1]):
            k = bin_of(output.paths[i] * worth[b] / most)
            counts[k] += 1
            gains[k] += output.paths[i] * worth[b]
    # Gains are of all rows; divide them among the rows with a token in the pass.
    for k in range(NUM_BINS):
        gains[k] = gains[k] * num_computed / worth.size
    num_bins = choose_bins(num_computed, counts, gains, sizes, seconds)
    least, num_out, begin = np.inf, 0, output.offsets[0]
    has_cut = False
    for b in range(worth.size):
        end, num_before = output.offsets[b + 1], num_out
        for i in range(begin, end):
            if bin_of(output.paths[i] * worth[b] / most) >= num_bins:
                has_cut |= not output.is_probe[b]
                continue
            if not output.is_probe[b]:
                least = min(least, output.paths[i])
            renamed[i - begin] = num_out - num_before
            parent = output.parents[i]
            output.tokens[num_out], output.estimates[num_out] = output.tokens[i], output.estimates[i]
            output.parents[num_out] = renamed[parent] if parent >= 0 else -1
            output.paths[num_out] = output.paths[i]
            for j in range(NUM_VOTES):
                output.shares[num_out, j] = output.shares[i, j]
            for j in range(NUM_KINDS):
                output.features[num_out, j] = output.features[i, j]
            num_out += 1
        begin = end
        output.offsets[b + 1] = num_out
    return least if has_cut and least < np.inf else 0.0


ROWS_PER_PROBE = 64
"""Number of rows with matches but no draft after which one of them is drafted one token, as a probe."""
_PROBE_PROBABILITY = 0.99


class Budget(NamedTuple):
    """Limits of drafts; costs of size 0 keep every drafted token."""

    max_draft: int  # per row
    least: float  # see `tree.Row`
    rise: float
    cost_sizes: Int64Array
    cost_seconds: Float64Array
    fixed: float  # see `worth.weigh_rows`


class Found(NamedTuple):
    """Matches of the rows of a batch of searches."""

    matches: Matches  # MATCH [MAX_QUERIES, M]
    num_matches: Int64Array  # [MAX_QUERIES]


FOUND = Memory(Found, matches=(MATCH, (MAX_QUERIES, MAX_MATCHES)), num_matches=(np.int64, MAX_QUERIES))
_SEARCH_AT = WORKSPACE.num_bytes
_FOUND_AT = _SEARCH_AT + BATCHED_SEARCH.num_bytes
_BINS_AT = _FOUND_AT + FOUND.num_bytes
NUM_SCRATCH_BYTES = _BINS_AT + BINS.num_bytes
"""Bytes of scratch that the rows of a call share, one row or stage after another."""
# These are for use within compiled calls.
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
    """Write a row's draft from its matches, after `at` tokens of other rows; return its number of tokens."""
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
        # Without probes, a token with a low estimate would never be observed, and its estimate would stay low.
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
    """Write the drafts of all rows; return their number of tokens."""
    workspace, search = _workspace(scratch, 0), _search(scratch, _SEARCH_AT)
    matches, num_matches = _found(scratch, _FOUND_AT)
    texts = Texts(history.text, running.chains.tokens, others.text)
    num_out, num_rows = 0, rows.num_tokens.size
    output.offsets[0] = 0
    # Each stage runs for several rows before the next stage, because code would be fetched again for every row.
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
    """Note which rows have no draft. A probe that was cut stays due. Duplicate rows get their leaders' states."""
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


@stamped
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
    value: Value,
    scratch: UInt8Array,
) -> tuple[int, float, int]:
    """Write the drafts of all rows to `output`, and what they are worth to `value`.

    The `NUM_SCRATCH_BYTES` of `scratch` may hold anything.

    Returns:
        The first row whose counts contradict each other, or -1; what `cut` returns; the number of tokens before the
        cut.
    """
    bad_row: int = _first_bad_row(rows)
    if bad_row >= 0:
        return bad_row, 0.0, 0
    note_rows(running, rows.groups, rows.tokens, rows.num_tokens, rows.num_prompt)
    num_out = _draft_all(rows, history, running, others, states, enabled, model, budget, num_undrafted, output, scratch)
    cutoff = 0.0
    if budget.cost_sizes.size > 0 and num_out > 0:
        note_gains(rows, running, states, output.offsets, output.paths, output.is_probe, value.gains)
        shape = shape_of_lengths(rows.prompts, history) if budget.fixed > 0 else 1.0
        weigh_rows(value, rows.leaders, shape, budget.fixed)
        cutoff = cut(value.worth, output, budget.cost_sizes, budget.cost_seconds, _bins(scratch, _BINS_AT))
    _note_undrafted(rows, running, states, num_undrafted, output)
    return -1, cutoff, num_out
