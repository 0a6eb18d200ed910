"""Lay out a step of the running rows: which rows are computed with which drafts, and which samples are appended.

Rows with identical tokens, such as siblings before their first difference, have identical keys, values and logits, so a
pass computes the first of them, the leader. Each row samples with its own noise, so results do not change (law 5).

    B running rows   R sampled rows   T tokens of a pass   W sampled positions   L columns   Q stop tokens
    D drafted tokens of all rows   J most drafts of a row   K slots that move
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.engine.batch.rows import BatchState
from treering.engine.batch.token_batch import PER_TOKEN, TokenBatch
from treering.engine.sampling.sample_cpu import verify
from treering.engine.sampling.torch_sampling import diverged
from treering.errors import StateError
from treering.history.draft_types import Drafts
from treering.types import TokenIds


def leaders_of(columns: BatchState, num_rows: int) -> Int64Array:
    """Return the first row with the same tokens as each row, int64 [B]; a row without duplicates leads itself.

    Only rows that have all but their last token computed and share their prompt in the arena can be duplicates.

    Example: rows 5 6 7, 5 6 8 and 5 6 7 after one prompt have the leaders 0, 1 and 0.
    """
    leaders = np.arange(num_rows)
    if num_rows > 1:
        c = columns
        _fill_leaders(c.tokens, c.num_tokens, c.num_computed, c.num_prefix, c.prefix_start, c.is_ready, leaders)
    return leaders


@kernel
def _fill_leaders(
    tokens: Int32Array,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prefix: Int64Array,
    prefix_start: Int64Array,
    is_ready: BoolArray,
    leaders: Int64Array,
) -> None:
    for row in range(1, leaders.size):
        size, first = num_tokens[row], num_prefix[row]
        if not is_ready[row] or size - num_computed[row] != 1:
            continue
        for other in range(row):
            is_alike = num_tokens[other] == size and num_computed[other] == size - 1 and is_ready[other]
            has_same_prefix = num_prefix[other] == first and prefix_start[other] == prefix_start[row]
            if not is_alike or not has_same_prefix:
                continue
            # Newest tokens first: rows that differ mostly differ there.
            at = size - 1
            while at >= first and tokens[row, at] == tokens[other, at]:
                at -= 1
            if at < first:
                leaders[row] = other
                break


MOST_DRAFTS = 64
"""Most draft tokens of a row, because each takes one bit of an int64."""


class DraftTrees(NamedTuple):
    """Clipped drafts of B rows; row b has entries offsets[b] to offsets[b + 1] - 1, in the drafter's order."""

    tokens: TokenIds  # int32 [D]
    offsets: Int64Array  # [B + 1]
    parents: Int32Array  # [D] index of the parent within the row, -1 is the context's last token
    depths: Int64Array  # [D] positions after the context's last token, from 1
    bits: Int64Array  # [D] mask of itself and its ancestors within the row; 0 for a chain, which sees all before it
    numbers: Int64Array  # [D] index of each token within the drafter's row, which may have more tokens


def no_drafts(num_rows: int) -> DraftTrees:
    """Return empty drafts for `num_rows` rows."""
    none, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return DraftTrees(ids, np.zeros(num_rows + 1, np.int64), ids, none, none, none)


def clip_drafts(
    drafts: Drafts, max_drafts: Int64Array, vocab_size: int, stop_tokens: Int32Array | None = None
) -> DraftTrees:
    """Clip each row's draft to its first `max_drafts[b]` tokens that a pass has to compute.

    Drafters already respect the limit; the clip guards the next row's slots. A row's draft also ends before the first
    token outside the vocabulary, because the history may come from another tokenizer. Parents precede their children,
    so the first tokens of a tree are a tree.

    Stop tokens and their descendants are dropped: a stop token is sampled at its parent, and no rollout continues
    after it. `count_accepted` reports to the drafter whether it was sampled.

    Args:
        drafts: drafts of B rows.
        max_drafts: int64 [B], most draft tokens of each row.
        vocab_size: the model's number of token ids.
        stop_tokens: int32 [B, Q] of each row, padded with -1; None for none.

    Raises:
        StateError: if a token comes before its parent.

    Example: with vocab_size=9, max_drafts [4, 4] and offsets [0, 3, 5], the chains [1, 9, 2] and [3, 4] become [1] and
    [3, 4]; if 4 is a stop token of the second row, [1] and [3]. The tree [5, 6, 7] with parents [-1, 0, -1] has depths
    [1, 2, 1] and bits [0, 0, 0b100].
    """
    if drafts.tokens.size == 0:
        return no_drafts(drafts.offsets.size - 1)
    size, num_rows = drafts.tokens.size, drafts.offsets.size - 1
    tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
    columns, offsets = np.empty((3, size), np.int64), np.zeros(num_rows + 1, np.int64)
    scratch = np.empty((2, MOST_DRAFTS), np.int64)
    stops = np.zeros((num_rows, 0), np.int32) if stop_tokens is None else stop_tokens
    bad_row = _clip(
        drafts.tokens, drafts.offsets, drafts.parents, max_drafts, vocab_size, stops, tokens, offsets, parents, columns,
        scratch,
    )  # fmt: skip
    if bad_row >= 0:
        own = drafts.parents[drafts.offsets[bad_row] : drafts.offsets[bad_row + 1]]
        raise StateError(
            f"a draft token must come after its parent (-1 is the context), but row {bad_row} has parents "
            f"{own.tolist()}; sort the draft by depth"
        )
    end = offsets[-1]
    return DraftTrees(tokens[:end], offsets, parents[:end], *columns[:, :end])


def count_accepted(
    drafts: Drafts,
    proposed: DraftTrees,
    leaders: Int64Array,
    contexts: TokenIds,
    num_tokens: Int64Array,
    num_accepted: Int64Array,
    leaves: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return each row's accepted tokens and the index of the last one, counted in the drafter's own unclipped drafts.

    If the token sampled after the last accepted one was drafted there but clipped, it counts as accepted too.

    Args:
        drafts: the drafter's unclipped drafts.
        proposed: the clipped drafts.
        leaders: int64 [B], the row whose draft each row was verified with.
        contexts: int32 [B, L], sampled tokens included.
        num_tokens: int64 [B], of each context.
        num_accepted: int64 [B], accepted tokens of the clipped drafts.
        leaves: int64 [B], index of the last accepted one among them, -1 for none.

    Example: from the chain [3, 4] only 3 was computed, because 4 is a stop token, and 3 was accepted. If the context
    ends in 3 4, the result is 2 tokens and index 1; if it ends in 3 5, it is 1 token and index 0.
    """
    counted = np.empty((2, num_accepted.size), np.int64)
    _fill_accepted(
        drafts.tokens, drafts.offsets, drafts.parents, proposed.offsets, proposed.numbers, leaders, contexts,
        num_tokens, num_accepted, leaves, counted,
    )  # fmt: skip
    return counted[0], counted[1]


@kernel
def _clip(
    tokens: TokenIds,
    offsets: Int64Array,
    parents: Int32Array,
    max_drafts: Int64Array,
    vocab_size: int,
    stop_tokens: Int32Array,
    tokens_out: TokenIds,
    offsets_out: Int64Array,
    parents_out: Int32Array,
    columns: Int64Array,
    scratch: Int64Array,
) -> int:
    """Fill the output arrays (columns: depths, bits, numbers); return -1, or the first row with unsorted parents."""
    depths, bits, numbers = columns[0], columns[1], columns[2]
    ancestors, kept = scratch[0], scratch[1]
    at = 0
    for row in range(offsets.size - 1):
        first, start = offsets[row], at
        for number in range(min(offsets[row + 1] - first, max_drafts[row], MOST_DRAFTS)):
            token, parent = tokens[first + number], parents[first + number]
            if parent >= number or parent < -1:
                return row
            if token < 0 or token >= vocab_size:
                break
            kept_parent = kept[parent] if parent >= 0 else -1
            if (parent >= 0 and kept_parent < 0) or _is_in(token, stop_tokens[row]):
                kept[number] = -1
                continue
            index = kept[number] = at - start
            depths[at] = 1 + (depths[start + kept_parent] if kept_parent >= 0 else 0)
            ancestors[index] = (ancestors[kept_parent] if kept_parent >= 0 else 0) | np.int64(1) << index
            bits[at] = 0 if depths[at] == index + 1 else ancestors[index]
            tokens_out[at], parents_out[at], numbers[at] = token, kept_parent, number
            at += 1
        offsets_out[row + 1] = at
    return -1


@lean
def _is_in(token: int, stop_tokens: Int32Array) -> bool:
    found = False
    for stop in stop_tokens:
        found |= stop == token
    return found


@kernel
def _fill_accepted(
    tokens: TokenIds,
    offsets: Int64Array,
    parents: Int32Array,
    computed_offsets: Int64Array,
    numbers: Int64Array,
    leaders: Int64Array,
    contexts: TokenIds,
    num_tokens: Int64Array,
    num_accepted: Int64Array,
    leaves: Int64Array,
    counted: Int64Array,
) -> None:
    for row in range(leaves.size):
        leader = leaders[row]
        leaf = numbers[computed_offsets[leader] + leaves[row]] if leaves[row] >= 0 else -1
        counted[0, row], counted[1, row] = num_accepted[row], leaf
        first, drawn = offsets[leader], contexts[row, num_tokens[row] - 1]
        for number in range(leaf + 1, offsets[leader + 1] - first):
            if parents[first + number] == leaf and tokens[first + number] == drawn:
                counted[0, row], counted[1, row] = num_accepted[row] + 1, number


class StepInputs(NamedTuple):
    """Inputs of a pass: the rows' tokens, and which rows are sampled from which logits."""

    batch: TokenBatch  # T tokens, W of them wanted
    rows: Int64Array  # [R] sampled rows
    leaders: Int64Array  # [R] the row computed for each of these: itself, or the one it duplicates
    first_logits: Int64Array  # [R] first entry of each among the wanted tokens
    num_fed: Int64Array  # [B] context tokens that the pass computes for the row or its leader, without drafts


@kernel
def fill_max_drafts(
    is_ready: BoolArray,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    limit: Int64Array,
    leaders: Int64Array,
    max_drafts: Int64Array,
) -> None:
    """Fill `max_drafts` [B] with the number of draft tokens that each decoding row has slots for; 0 for other rows.

    A duplicate row gets 0: it uses its leader's drafts. A rollout's last possible token is sampled but never computed,
    so the slots end one before the limit.
    """
    for row in range(max_drafts.size):
        decodes = leaders[row] == row and is_ready[row] and num_tokens[row] - num_computed[row] == 1
        max_drafts[row] = limit[row] - num_tokens[row] - 1 if decodes else 0


def make_inputs(columns: BatchState, leaders: Int64Array, max_prefill: int, drafts: DraftTrees) -> StepInputs:
    """Make the inputs of the next pass over rows 0 to B - 1, given each row's leader `leaders` [B].

    A duplicate row computes nothing; it is sampled from its leader's logits, along its leader's drafts. A decoding row
    (one missing token) computes that token and its drafts, and is sampled after each. A row with more missing tokens
    gets its share of `max_prefill`, and is sampled once nothing is missing. Drafts follow the context in the row's own
    span, in the drafter's order; each has the position of its depth.
    """
    c, num_rows = columns, leaders.size
    # One array for all columns: numba unpacks each argument, which takes longer than filling it.
    per_token = np.empty((10, num_rows + max_prefill + drafts.tokens.size), np.int64)
    rows = np.empty((5, num_rows), np.int64)
    num_tokens, num_wanted, num_sampled = _fill_inputs(
        c.tokens, c.num_tokens, c.num_computed, c.num_prefix, c.prefix_start, c.own_start, c.is_ready, leaders,
        max_prefill, drafts.tokens, drafts.offsets, drafts.depths, drafts.bits, per_token, rows,
    )  # fmt: skip
    batch = TokenBatch(
        **dict(zip(PER_TOKEN, per_token[:9, :num_tokens], strict=True)), wanted=per_token[9, :num_wanted]
    )
    return StepInputs(batch, rows[0, :num_sampled], rows[1, :num_sampled], rows[2, :num_sampled], rows[3])


@kernel
def _fill_inputs(
    context: Int32Array,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prefixed: Int64Array,
    first_prefix: Int64Array,
    first_own: Int64Array,
    is_ready: BoolArray,
    leaders: Int64Array,
    max_prefill: int,
    draft_tokens: Int32Array,
    offsets: Int64Array,
    depths: Int64Array,
    bits: Int64Array,
    per_token: Int64Array,
    per_row: Int64Array,
) -> tuple[int, int, int]:
    """Fill the columns of `StepInputs`; return the numbers of tokens, wanted tokens and rows."""
    tokens, positions, slots, prefix_start, num_prefix, own_start, num_own, tree_start, tree_bits = (
        per_token[0], per_token[1], per_token[2], per_token[3], per_token[4], per_token[5], per_token[6], per_token[7],
        per_token[8],
    )  # fmt: skip
    wanted, rows, row_leaders, first_logits, num_fed = per_token[9], per_row[0], per_row[1], per_row[2], per_row[3]
    first_of = per_row[4]
    at = num_wanted = num_sampled = 0
    for row in range(leaders.size):
        if leaders[row] != row:
            rows[num_sampled], row_leaders[num_sampled], num_fed[row] = row, leaders[row], 1
            first_logits[num_sampled] = first_of[leaders[row]]
            num_sampled += 1
            continue
        num_fed[row] = 0
        missing = num_tokens[row] - num_computed[row]
        if not is_ready[row] or (missing > 1 and max_prefill == 0):
            continue
        num_fed[row] = missing if missing == 1 else min(missing, max_prefill)
        max_prefill -= num_fed[row] if missing > 1 else 0
        first_draft, num_drafts = offsets[row], offsets[row + 1] - offsets[row]
        # Slots in use in the row's own span once the fed tokens are computed.
        num_filled = num_computed[row] + num_fed[row] - num_prefixed[row]
        is_sampled = num_fed[row] == missing
        if is_sampled:
            rows[num_sampled], row_leaders[num_sampled], first_logits[num_sampled] = row, row, num_wanted
            first_of[row] = num_wanted
            num_sampled += 1
        for step in range(num_fed[row] + num_drafts):
            prefix_start[at], num_prefix[at] = first_prefix[row], num_prefixed[row]
            own_start[at] = first_own[row]
            tree_start[at], tree_bits[at] = own_start[at] + num_filled, 0
            number = step - num_fed[row]
            if number < 0:
                positions[at] = num_computed[row] + step
                tokens[at] = context[row, positions[at]]
                num_own[at] = num_filled + number + 1
                slots[at] = own_start[at] + num_own[at] - 1
            else:
                draft = first_draft + number
                tokens[at], tree_bits[at] = draft_tokens[draft], bits[draft]
                positions[at] = num_prefix[at] + num_filled + depths[draft] - 1
                num_own[at] = num_filled + (number + 1 if tree_bits[at] == 0 else 0)
                slots[at] = tree_start[at] + number
            if is_sampled and number >= -1:
                wanted[num_wanted] = at
                num_wanted += 1
            at += 1
    return at, num_wanted, num_sampled


class VerifiedTokens(NamedTuple):
    """Accepted drafts of the sampled rows and one more token each; [R, 1 + J], filled up to `num_tokens`."""

    tokens: TokenIds
    logprobs: Float64Array
    policy_logprobs: Float64Array
    num_tokens: Int64Array  # [R]
    path: Int32Array  # indices of the accepted drafts within their row, then -1


SampleAndVerify = Callable[[Tensor, StepInputs, BatchState, DraftTrees], VerifiedTokens]
"""Signature of `sample_and_verify`."""


def sample_and_verify(logits: Tensor, inputs: StepInputs, columns: BatchState, drafts: DraftTrees) -> VerifiedTokens:
    """Sample the next tokens of every sampled row from logits [W, V] of the pass.

    Raises:
        StateError: if a row of logits has NaN or +inf, or only -inf.
    """
    rows = inputs.rows
    num_drafts = drafts.offsets[inputs.leaders + 1] - drafts.offsets[inputs.leaders]
    shape = (rows.size, 1 + int(num_drafts.max(initial=0)))
    verified = VerifiedTokens(
        tokens=np.zeros(shape, np.int32),
        logprobs=np.zeros(shape),
        policy_logprobs=np.zeros(shape),
        num_tokens=np.zeros(rows.size, np.int64),
        path=np.full(shape, -1, np.int32),
    )
    # Widening 16-bit floats changes no value.
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    bad = verify(
        wide.cpu().numpy(),
        inputs.first_logits,
        num_drafts,
        drafts.tokens,
        drafts.parents,
        drafts.offsets[inputs.leaders],
        columns.keys[rows],
        columns.num_tokens[rows],
        columns.temperature[rows],
        columns.top_k[rows],
        columns.top_p[rows],
        columns.log_min_p[rows],
        columns.penalty[rows],
        columns.tokens,
        rows,
        *verified,
    )
    if bad >= 0:
        raise diverged(int(rows[bad]))
    return verified


NOT_FINISHED, STOPPED, REACHED_LIMIT = 0, 1, 2


class CommittedTokens(NamedTuple):
    """Counts for the R sampled rows (in the order of `StepInputs.rows`), for all B rows, and K key-value moves."""

    num_new: Int64Array  # [R] tokens appended
    finish: Int64Array  # [R] NOT_FINISHED, STOPPED or REACHED_LIMIT
    num_accepted: Int64Array  # [B] draft tokens among the appended ones
    leaves: Int64Array  # [B] index of the last accepted draft within its row, -1 for none
    sources: Int64Array  # [K] slots of accepted tokens to copy from, as `Decoder.move` takes them
    targets: Int64Array  # [K] slots to copy their keys and values to


def commit_tokens(
    columns: BatchState,
    inputs: StepInputs,
    version: int,
    tokens: Int32Array,
    logprobs: Float64Array,
    policy_logprobs: Float64Array,
    num_out: Int64Array,
    path: Int32Array,
) -> CommittedTokens:
    """Append the sampled tokens [R, 1 + J] up to each row's first stop token or its limit.

    Every sampled token but the last was computed as draft path[r, i] of its row, so only the last one is missing in
    the arena. A row needs its accepted drafts in consecutive slots, even if it has finished, because it may be
    branched. Few have to move, because a draft's likeliest path comes first. A duplicate row needs a copy of
    everything that its leader computed.
    """
    c = columns
    # Few arrays: numba unpacks each argument, which takes longer than filling it.
    sampled, every = np.zeros((2, inputs.rows.size), np.int64), np.zeros((2, inputs.num_fed.size), np.int64)
    moves = np.empty((2, path.size), np.int64)
    num_moves = _append(
        c.tokens, c.logprobs, c.policy_logprobs, c.versions, c.was_sampled, c.num_tokens, c.num_computed, c.num_prompt,
        c.num_prefix, c.own_start, c.limit, c.stop_tokens, inputs.rows, inputs.leaders, inputs.num_fed, version, tokens,
        logprobs, policy_logprobs, num_out, path, sampled, every, moves,
    )  # fmt: skip
    return CommittedTokens(*sampled, *every, *moves[:, :num_moves])


@kernel
def _append(
    context: Int32Array,
    all_logprobs: Float64Array,
    all_policy_logprobs: Float64Array,
    versions: Int32Array,
    was_sampled: BoolArray,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prompt: Int64Array,
    num_prefix: Int64Array,
    own_start: Int64Array,
    limit: Int64Array,
    stop_tokens: Int32Array,
    rows: Int64Array,
    leaders: Int64Array,
    num_fed: Int64Array,
    version: int,
    tokens: Int32Array,
    logprobs: Float64Array,
    policy_logprobs: Float64Array,
    num_out: Int64Array,
    path: Int32Array,
    sampled: Int64Array,
    every: Int64Array,
    moves: Int64Array,
) -> int:
    """Fill `CommittedTokens`: sampled [2, R] and every [2, B], both zeros, and moves [2, >= K]; return K."""
    num_new, finish, num_accepted, leaves = sampled[0], sampled[1], every[0], every[1]
    for row in range(num_fed.size):
        num_computed[row] += num_fed[row]
        leaves[row] = -1
    for index in range(rows.size):
        row = rows[index]
        while num_new[index] < num_out[index] and finish[index] == NOT_FINISHED:
            token = tokens[index, num_new[index]]
            at = num_tokens[row]
            column = at - num_prompt[row]
            context[row, at] = token
            all_logprobs[row, column] = logprobs[index, num_new[index]]
            all_policy_logprobs[row, column] = policy_logprobs[index, num_new[index]]
            versions[row, column] = version
            was_sampled[row, column] = True
            num_tokens[row] += 1
            num_new[index] += 1
            if num_tokens[row] >= limit[row]:
                finish[index] = REACHED_LIMIT
            for stop in stop_tokens[row]:
                if stop == token:
                    finish[index] = STOPPED
        num_computed[row] = num_tokens[row] - 1
        # The last token is sampled but not computed, even where the row ends inside its leader's draft.
        num_accepted[row] = num_new[index] - 1
        if num_accepted[row] > 0:
            leaves[row] = path[index, num_accepted[row] - 1]
    num_moves: int = _list_moves(num_tokens, num_prefix, own_start, rows, leaders, num_new, num_accepted, path, moves)
    return num_moves


@lean
def _list_moves(
    num_tokens: Int64Array,
    num_prefix: Int64Array,
    own_start: Int64Array,
    rows: Int64Array,
    leaders: Int64Array,
    num_new: Int64Array,
    num_accepted: Int64Array,
    path: Int32Array,
    moves: Int64Array,
) -> int:
    """Fill the key-value moves of the rows; return their number.

    Copies into duplicate rows come first, because the leader's own moves overwrite slots that they read.
    """
    num_moves = 0
    for is_duplicate in (True, False):
        for index in range(rows.size):
            row, leader = rows[index], leaders[index]
            if (leader != row) != is_duplicate:
                continue
            # Offset, in both spans, of the first slot after the tokens that the pass began with.
            offset = num_tokens[row] - num_new[index] - num_prefix[row]
            source, target = own_start[leader] + offset, own_start[row] + offset
            if is_duplicate:
                moves[0, num_moves], moves[1, num_moves] = source - 1, target - 1
                num_moves += 1
            for step in range(num_accepted[row]):
                if source + path[index, step] != target + step:
                    moves[0, num_moves], moves[1, num_moves] = source + path[index, step], target + step
                    num_moves += 1
    return num_moves


def counts_of(
    inputs: StepInputs, committed: CommittedTokens, drafts: DraftTrees, num_prefilled: int, is_early: BoolArray
) -> dict[str, int]:
    """Return a step's increments of `EngineStats`, by field.

    `num_prefilled` counts the tokens of shared prompts, and `is_early` [B] marks the rows that rehearse.
    """
    num_drafted = int((drafts.offsets[inputs.leaders + 1] - drafts.offsets[inputs.leaders]).sum())
    num_early = int(is_early[inputs.rows].sum())
    num_rehearsed = int(committed.num_new[is_early[inputs.rows]].sum()) if num_early else 0
    # For a few numbers, summing a list is faster than summing an array.
    return {
        "num_forwards": 1,
        "num_rows": inputs.rows.size - num_early,
        "num_sampled": sum(committed.num_new.tolist()) - num_rehearsed,
        "num_rehearsed": num_rehearsed,
        "num_prefilled": num_prefilled + sum(inputs.num_fed.tolist()) - inputs.rows.size,
        "num_drafted": num_drafted,
        "num_duplicate_rows": int(((inputs.leaders != inputs.rows) & ~is_early[inputs.rows]).sum()),
        "num_accepted": sum(committed.num_accepted.tolist()),
    }
