"""Sample rows that may not sample every token, and record the likeliest tokens of rows that ask for them.

A row with hidden tokens gets its own copy of the logits, in which they are -inf, because rows that share logits may
hide different tokens. Drafts are verified against that copy, so they change no token (law 5).

    R sampled rows   K likeliest tokens
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.engine.batch.rows import BatchState
from treering.engine.batch.step_inputs import DraftTrees, SampleAndVerify, StepInputs, VerifiedTokens
from treering.engine.protocol import TopLogprobs
from treering.engine.sampling.torch_sampling import Repetitions, distributions


def sample_masked(
    sampler: SampleAndVerify,
    logits: Tensor,
    inputs: StepInputs,
    columns: BatchState,
    drafts: DraftTrees,
    *,
    never: Sequence[int] = (),
) -> tuple[VerifiedTokens, dict[int, TopLogprobs]]:
    """Sample with `sampler`, but neither the token ids `never` nor, before a row's `first_end`, its stop tokens.

    Like top-k, this renormalises `logprobs`; `policy_logprobs` stay those of the whole distribution.

    Returns:
        The sampled tokens, and the likeliest tokens [1 + accepted drafts, K] of the rows that ask for them, by index.

    Raises:
        StateError: if a row of logits has NaN or +inf, or only -inf.

    Example: with logits [0, 0, 0, 0] and never=[3], the other tokens have log-probability -log 3, and -log 4 under the
    policy.
    """
    rows = inputs.rows
    is_masked = (columns.num_tokens[rows] < columns.first_end[rows]) | bool(never)
    if not is_masked.any():
        verified = sampler(logits, inputs, columns, drafts)
        return verified, _likeliest(logits, inputs, logits, inputs, columns, verified)
    kept, own = _masked(logits, inputs, columns, drafts, is_masked, never)
    verified = sampler(kept, own, columns, drafts)
    index, depth, offset = _cells(verified, is_masked)
    temperature = _on(logits, columns.temperature[rows[index]])[:, None]
    whole, rest = (
        torch.logsumexp(values[_on(logits, each.first_logits[index] + offset)].double() / temperature, -1)
        for values, each in ((logits, inputs), (kept, own))
    )
    verified.policy_logprobs[index, depth] -= (whole - rest).cpu().numpy()
    return verified, _likeliest(logits, inputs, kept, own, columns, verified)


def _masked(
    logits: Tensor,
    inputs: StepInputs,
    columns: BatchState,
    drafts: DraftTrees,
    is_masked: BoolArray,
    never: Sequence[int],
) -> tuple[Tensor, StepInputs]:
    """Return the logits with masked copies for the rows `is_masked` [R], and inputs that point to these."""
    chosen = np.flatnonzero(is_masked)
    first_draft = drafts.offsets[inputs.leaders[chosen]]
    lengths = 1 + drafts.offsets[inputs.leaders[chosen] + 1] - first_draft
    begins = np.cumsum(lengths) - lengths
    number = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    depths, is_draft = np.zeros(number.size, np.int64), number > 0
    depths[is_draft] = drafts.depths[(np.repeat(first_draft, lengths) + number - 1)[is_draft]]
    row = np.repeat(inputs.rows[chosen], lengths)
    copies = logits[_on(logits, np.repeat(inputs.first_logits[chosen], lengths) + number)]
    copies[:, list(never)] = -torch.inf
    stops = columns.stop_tokens[row]
    is_early = columns.num_tokens[row] + depths < columns.first_end[row]
    at, which = np.nonzero((stops >= 0) & (stops < logits.shape[1]) & is_early[:, None])
    copies[_on(logits, at), _on(logits, stops[at, which].astype(np.int64))] = -torch.inf
    kept = copies if is_masked.all() else torch.cat([logits, copies])
    first_logits = inputs.first_logits.copy()
    first_logits[chosen] = kept.shape[0] - copies.shape[0] + begins
    return kept, inputs._replace(first_logits=first_logits)


def _cells(verified: VerifiedTokens, is_chosen: BoolArray) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the index and depth of every sampled token of some rows, and where the row's logits of it are."""
    index, depth = np.nonzero((np.arange(verified.path.shape[1]) < verified.num_tokens[:, None]) & is_chosen[:, None])
    # The first token is sampled after the context, each later one after the draft that was accepted.
    return index, depth, np.where(depth == 0, 0, 1 + verified.path[index, depth - 1])


def _likeliest(
    logits: Tensor, inputs: StepInputs, kept: Tensor, own: StepInputs, columns: BatchState, verified: VerifiedTokens
) -> dict[int, TopLogprobs]:
    """Return the likeliest tokens of the rows with `num_top`, given the logits and those without hidden tokens."""
    num_top = columns.num_top[inputs.rows]
    if not num_top.any():
        return {}
    index, depth, offset = _cells(verified, num_top > 0)
    row = inputs.rows[index]
    temperature = _on(logits, columns.temperature[row])
    _, sampled = distributions(
        kept[_on(logits, own.first_logits[index] + offset)],
        temperature=temperature,
        top_k=_on(logits, columns.top_k[row]),
        top_p=_on(logits, columns.top_p[row]),
        log_min_p=_on(logits, columns.log_min_p[row]),
        repetitions=_repetitions(logits, columns, verified, row, index, depth),
    )
    greedy = np.flatnonzero(columns.top_k[row] == 1)
    if greedy.size:
        at = _on(logits, greedy)
        whole = logits[_on(logits, (inputs.first_logits[index] + offset)[greedy])]
        sampled[at] = (whole.double() / temperature[at][:, None]).log_softmax(-1)
    values, tokens = (each.cpu().numpy() for each in sampled.topk(min(int(num_top.max()), logits.shape[1])))
    return {
        i: TopLogprobs(tokens[index == i, : num_top[i]].astype(np.int32), values[index == i, : num_top[i]])
        for i in np.flatnonzero(num_top).tolist()
    }


def _repetitions(
    logits: Tensor, columns: BatchState, verified: VerifiedTokens, row: Int64Array, index: Int64Array, depth: Int64Array
) -> Repetitions | None:
    penalised = np.flatnonzero(columns.penalty[row] != 1)
    if not penalised.size:
        return None
    seen = [
        np.append(columns.tokens[row[at], : columns.num_tokens[row[at]]], verified.tokens[index[at], : depth[at]])
        for at in penalised
    ]
    at = np.repeat(penalised, [some.size for some in seen])
    tokens = np.concatenate(seen).astype(np.int64)
    return Repetitions(*(_on(logits, each) for each in (at, tokens, columns.penalty[row[at]])))


def _on(logits: Tensor, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
