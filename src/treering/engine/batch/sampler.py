"""Samples next tokens from logits and verifies drafts, in one compiled call on the CPU.

On CUDA with triton, `treering.engine.decoder.cuda.verify` does both on the device.

    W sampled positions   R sampled rows   J most drafts of a row   V vocabulary
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Float64Array, Int32Array, Int64Array
from treering.engine.batch.draft_tree import DraftTrees
from treering.engine.batch.state import BatchState, StepInputs
from treering.engine.sampling.reference import diverged
from treering.engine.sampling.verify_cpu import verify
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
    """Samples the next tokens of every sampled row from logits [W, V] of the pass.

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
    # Narrower numbers are widened, which changes none of them.
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
