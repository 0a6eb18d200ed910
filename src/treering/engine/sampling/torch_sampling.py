"""Sample from logits by Gumbel-max with keyed noise: the specification, in torch, for any device.

Drafts do not appear here: verification samples every drafted position with the position's own noise and accepts drafts
while they equal the samples, so results cannot depend on drafts.

The sampled token is argmax p / E with E = -log(u) exponential, which is token i with probability p_i (equivalent to
adding Gumbel noise -log(E) to the log-probs).

    M rows   V vocabulary
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from treering.engine.sampling.noise import uniforms
from treering.errors import StateError

MASS_SLACK = 1e-12
"""Tolerance for reaching `top_p`: whether 0.1 + 0.2 reaches 0.3 must not depend on rounding."""


class Repetitions(NamedTuple):
    """Tokens that each row's context contains, for rows with a penalty; a token may occur several times.

    Example: context [4, 5, 4] of row 0 and [7] of row 1 are rows [0, 0, 0, 1] and tokens [4, 5, 4, 7].
    """

    rows: Int64[Tensor, " K"]
    tokens: Int64[Tensor, " K"]
    penalty: Float64[Tensor, " K"]
    """Penalty of the token's row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """One sampled token per row.

    Example: token 1 of logits [2, 1, 0] at temperature 1 and top_p=0.7 has logprobs log 0.269 and policy_logprobs
    log 0.245.
    """

    tokens: Int64[Tensor, " M"]
    """int64 [M]."""
    logprobs: Float64[Tensor, " M"]
    """float64 [M], under the sampled distribution: after penalty, temperature, top-k, top-p and min-p."""
    policy_logprobs: Float64[Tensor, " M"]
    """float64 [M], after temperature only, without penalty and cuts."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.logprobs.shape == self.policy_logprobs.shape


def sample(
    logits: Float[Tensor, "M V"],
    *,
    keys: Int64[Tensor, " M"],
    positions: Int64[Tensor, " M"],
    temperature: Float64[Tensor, " M"],
    top_k: Int64[Tensor, " M"],
    top_p: Float64[Tensor, " M"],
    log_min_p: Float64[Tensor, " M"] | None = None,
    repetitions: Repetitions | None = None,
) -> SampledTokens:
    """Sample one token per row from the distribution that `Sampling` defines.

    Penalises repeated tokens, applies temperature, keeps the top_k largest logits, then the tokens whose predecessors
    have a mass below top_p, then those no more than log_min_p below the likeliest. Tokens rank by logit, ties by
    smaller id. Computes in float64. A logit of -inf hides its token. A row depends only on its own entries.

    Args:
        logits: before temperature; any float type.
        keys: noise keys of the rows' rollouts, from `row_key`.
        positions: absolute positions of the sampled tokens.
        temperature: > 0.
        top_k: number of tokens to draw from; 0 means all.
        top_p: probability mass to draw from, in (0, 1]; 1 means all.
        log_min_p: logarithm of the least probability relative to the likeliest token's; None or -inf means all.
        repetitions: tokens to penalise; None means none.

    Raises:
        StateError: if a row has NaN or +inf, or only -inf.

    Example: logits [2, 1, 0] at temperature 1 with top_p=0.7 give token 0 with probability 0.731, otherwise token 1.
    """
    policy, processed = distributions(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, log_min_p=log_min_p, repetitions=repetitions
    )
    exponentials = -uniforms(keys, positions, logits.shape[1]).log()
    # argmax returns the first of equal maxima.
    tokens = (processed.exp() / exponentials).argmax(-1)
    at = tokens[:, None]
    return SampledTokens(
        tokens=tokens, logprobs=processed.gather(1, at)[:, 0], policy_logprobs=policy.gather(1, at)[:, 0]
    )


def distributions(
    logits: Float[Tensor, "M V"],
    *,
    temperature: Float64[Tensor, " M"],
    top_k: Int64[Tensor, " M"],
    top_p: Float64[Tensor, " M"],
    log_min_p: Float64[Tensor, " M"] | None,
    repetitions: Repetitions | None,
) -> tuple[Float64[Tensor, "M V"], Float64[Tensor, "M V"]]:
    """Return the log-probs of all tokens, after temperature only and under the sampled distribution; see `sample`.

    Raises:
        StateError: if a row has NaN or +inf, or only -inf.
    """
    wide = logits.double()
    top = wide.amax(-1, keepdim=True)
    is_bad = ~top[:, 0].isfinite()
    if bool(is_bad.any()):
        raise diverged(int(is_bad.nonzero()[0]))
    scaled = (wide - top) / temperature[:, None]
    policy = processed = scaled.log_softmax(-1)
    if repetitions is not None:
        wide = _penalised(wide, repetitions)
        scaled = (wide - wide.amax(-1, keepdim=True)) / temperature[:, None]
        processed = scaled.log_softmax(-1)
    is_cut = (top_k > 0) | (top_p < 1)
    if log_min_p is not None:
        is_cut |= log_min_p > -torch.inf
    if bool(is_cut.any()):
        kept = _kept(wide, scaled, top_k[:, None], top_p[:, None])
        if log_min_p is not None:
            kept &= scaled >= log_min_p[:, None]
        processed = scaled.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return policy, processed


def diverged(row: int) -> StateError:
    """Return the error for invalid logits, which all implementations share.

    Example: `raise diverged(3)` names row 3.
    """
    return StateError(
        f"logits must be finite (or -inf for a hidden token), and those of row {row} have NaN, +inf or only -inf: "
        "the weights have diverged; start another run (run.dir=...) from an earlier checkpoint (model.path=...) with a "
        "lower learning_rate"
    )


def _penalised(logits: Float64[Tensor, "M V"], repetitions: Repetitions) -> Float64[Tensor, "M V"]:
    """Return the logits with each repeated token penalised once, however often it occurs."""
    rows, tokens, penalty = repetitions
    # Computed from the original logits, so a token that occurs twice is written twice with the same value.
    found = logits[rows, tokens]
    return logits.index_put((rows, tokens), torch.where(found < 0, found * penalty, found / penalty))


def _kept(
    logits: Float64[Tensor, "M V"],
    scaled: Float64[Tensor, "M V"],
    top_k: Int64[Tensor, "M 1"],
    top_p: Float64[Tensor, "M 1"],
) -> Bool[Tensor, "M V"]:
    """Return the mask of the tokens that top-k and top-p keep."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[1], device=logits.device)
    is_kept = (rank < top_k) | (top_k == 0)
    mass = scaled.gather(1, order).exp().masked_fill(~is_kept, 0.0).cumsum(-1)
    before = mass.roll(1, -1)
    before[:, 0] = 0.0
    reach = (top_p - MASS_SLACK).clamp(min=MASS_SLACK) * mass[:, -1:]
    is_kept &= (before < reach) | (top_p >= 1)
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)
