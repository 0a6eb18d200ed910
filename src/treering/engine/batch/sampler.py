"""Samples next tokens from logits and verifies drafts: on CPU in one compiled call, elsewhere in torch.

On CUDA with kernels, `treering.engine.decoder.cuda.verify` does both on the device.

    W sampled positions   R sampled rows   J most drafts of a row   V vocabulary
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import Float64Array, Int32Array, Int64Array
from treering.engine.batch.draft_tree import DraftTrees
from treering.engine.batch.state import BatchState, StepInputs
from treering.engine.sampling.reference import Repetitions, diverged, sample
from treering.engine.sampling.verify_cpu import child, verify
from treering.types import TokenIds


class VerifiedTokens(NamedTuple):
    """Tokens of the sampled rows: accepted drafts and one more; [R, 1 + J], filled up to `num_tokens`."""

    tokens: TokenIds
    logprobs: Float64Array
    policy_logprobs: Float64Array
    num_tokens: Int64Array  # [R]
    path: Int32Array  # indices of the accepted drafts within their row, then -1


SampleAndVerify = Callable[[Tensor, StepInputs, BatchState, DraftTrees], VerifiedTokens]
"""See `sample_and_verify`."""


def sample_and_verify(logits: Tensor, inputs: StepInputs, columns: BatchState, drafts: DraftTrees) -> VerifiedTokens:
    """Samples the next tokens of every sampled row from logits [W, V] of `inputs.wanted`.

    Raises:
        StateError: logits with NaN or +inf, or -inf only.
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
    if logits.device.type == "cpu":
        _verify_on_cpu(logits, inputs, columns, drafts, num_drafts, verified)
    else:
        _verify_in_torch(logits, inputs, columns, drafts, num_drafts, verified)
    return verified


def never_sampling(token_ids: Sequence[int], sampler: SampleAndVerify) -> SampleAndVerify:
    """A sampler of all other tokens.

    As a cut does, it renormalises `logprobs`, and leaves `policy_logprobs` those of the whole distribution.

    Example: of the logits [0, 0, 0, 0] and the token 3 the others have the log-probability -log 3, and -log 4 under the
    policy.
    """

    def run(logits: Tensor, inputs: StepInputs, columns: BatchState, drafts: DraftTrees) -> VerifiedTokens:
        kept = logits.clone()
        kept[:, list(token_ids)] = -torch.inf
        verified = sampler(kept, inputs, columns, drafts)
        index, depth = np.nonzero(np.arange(verified.path.shape[1]) < verified.num_tokens[:, None])
        # The first token is sampled after the context, the next ones each after the draft that was accepted.
        draft = np.where(depth == 0, -1, verified.path[index, depth - 1])
        at = torch.from_numpy(inputs.first_logits[index] + 1 + draft).to(logits.device)
        temperature = torch.from_numpy(columns.temperature[inputs.rows[index]]).to(logits.device)[:, None]
        whole, rest = (torch.logsumexp(values[at].double() / temperature, -1) for values in (logits, kept))
        verified.policy_logprobs[index, depth] -= (whole - rest).cpu().numpy()
        return verified

    return run


def _verify_on_cpu(
    logits: Tensor,
    inputs: StepInputs,
    columns: BatchState,
    drafts: DraftTrees,
    num_drafts: Int64Array,
    verified: VerifiedTokens,
) -> None:
    rows = inputs.rows
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    bad = verify(
        wide.numpy(),
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
        verified.tokens,
        verified.logprobs,
        verified.policy_logprobs,
        verified.num_tokens,
        verified.path,
    )
    if bad >= 0:
        raise diverged(int(rows[bad]))


def _verify_in_torch(
    logits: Tensor,
    inputs: StepInputs,
    columns: BatchState,
    drafts: DraftTrees,
    num_drafts: Int64Array,
    verified: VerifiedTokens,
) -> None:
    """Samples at all positions of every row at once, and keeps the path that the drafts follow."""
    owner = np.repeat(inputs.rows, 1 + num_drafts)
    begins = np.cumsum(1 + num_drafts) - (1 + num_drafts)
    # The context's last token of every row has depth 0.
    depth, at = np.zeros(owner.size, np.int64), np.zeros(owner.size, np.int64)
    for leader, first, begin, count in zip(inputs.leaders, inputs.first_logits, begins, num_drafts, strict=True):
        own = drafts.offsets[leader]
        depth[begin + 1 : begin + 1 + count] = drafts.depths[own : own + count]
        at[begin : begin + 1 + count] = np.arange(first, first + 1 + count)

    def on_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    sampled = sample(
        # Without duplicate rows every row reads its own logits, in order.
        logits if (inputs.leaders == inputs.rows).all() else logits[on_device(at)],
        keys=on_device(columns.keys[owner]),
        positions=on_device(columns.num_tokens[owner] + depth),
        temperature=on_device(columns.temperature[owner]),
        top_k=on_device(columns.top_k[owner]),
        top_p=on_device(columns.top_p[owner]),
        log_min_p=on_device(columns.log_min_p[owner]),
        repetitions=repetitions_of(inputs, columns, drafts, num_drafts, logits.device),
    )
    tokens, logprobs, policy = (t.cpu().numpy() for t in (sampled.tokens, sampled.logprobs, sampled.policy_logprobs))
    for index, (leader, first) in enumerate(zip(inputs.leaders, begins, strict=True)):
        path = _walk(tokens[first:], drafts, drafts.offsets[leader], num_drafts[index])
        # The context's own logits come before those of the drafts.
        own = first + 1 + np.array([-1, *path])
        verified.num_tokens[index] = own.size
        verified.path[index, : len(path)] = path
        verified.tokens[index, : own.size] = tokens[own]
        verified.logprobs[index, : own.size], verified.policy_logprobs[index, : own.size] = logprobs[own], policy[own]


def repetitions_of(
    inputs: StepInputs, columns: BatchState, drafts: DraftTrees, num_drafts: Int64Array, device: torch.device
) -> Repetitions | None:
    """The tokens that every sampled position repeats, its draft's ancestors included; None without a penalty.

    Positions are those of the rows one after another: after a row's context, then after each of its drafts.
    """
    penalties = columns.penalty[inputs.rows]
    if (penalties == 1).all():
        return None
    rows, tokens = [], []
    begins = np.cumsum(1 + num_drafts) - (1 + num_drafts)
    for index in np.flatnonzero(penalties != 1):
        row, own = inputs.rows[index], drafts.offsets[inputs.leaders[index]]
        seen = [columns.tokens[row, : columns.num_tokens[row]]]
        for number in range(num_drafts[index]):
            parent = drafts.parents[own + number]
            seen.append(np.append(seen[1 + parent], drafts.tokens[own + number]))
        tokens += seen
        rows.append(np.repeat(begins[index] + np.arange(len(seen)), [some.size for some in seen]))
    at = np.concatenate(rows)
    every = np.repeat(penalties, 1 + num_drafts)
    arrays = at, np.concatenate(tokens).astype(np.int64), every[at]
    return Repetitions(*(torch.from_numpy(array).to(device) for array in arrays))


def _walk(tokens: NDArray[np.integer[Any]], drafts: DraftTrees, first: int, num_drafts: int) -> list[int]:
    """Indices of the accepted drafts of a row; `tokens` are sampled after its context, then after each draft."""
    path: list[int] = []
    number = child(tokens[0], -1, num_drafts, drafts.tokens, drafts.parents, first)
    while number >= 0:
        path.append(number)
        number = child(tokens[1 + number], number, num_drafts, drafts.tokens, drafts.parents, first)
    return path
