"""Log-probabilities, entropies and their gradients from one array of logits.

R rows   E scored tokens (each names its row)   V vocabulary
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

EntropyOf = Literal["all", "none"]
"""Whether entropies are computed; "none" returns zeros and saves two passes over the logits."""


def scaled_logits(
    head: Callable[[Tensor], Tensor], rows: Float[Tensor, "R C"], *, softcap: float | None, temperature: float
) -> Float[Tensor, "R V"]:
    """Logits of hidden rows, bounded as the model does and divided by the temperature; float32 or wider.

    Example: a logit of 4 with softcap 2 and temperature 0.5 is 2 tanh(4 / 2) / 0.5 = 3.86.
    """
    logits = head(rows)
    if softcap is not None:
        # In the head's own dtype, as the models do.
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


class LogitScores(torch.autograd.Function):
    """Scores from logits [R, V]; saves the logits once instead of the chain of softmax intermediates."""

    @staticmethod
    def forward(  # noqa: D102 - torch calls it
        ctx: Any, logits: Tensor, targets: Tensor, target_row: Tensor, entropy_of: EntropyOf
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        lse, entropy = consume_logits(logits.clone(), entropy_of)
        ctx.save_for_backward(logits, lse, entropy, targets, target_row)
        return logits[target_row, targets] - lse[target_row], entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:  # noqa: D102 - torch calls it
        logits, lse, entropy, targets, target_row = ctx.saved_tensors
        return logit_gradient(logits - lse[:, None], entropy, targets, target_row, *grads), None, None, None


def logit_gradient(
    log_weights: Float[Tensor, "R V"],
    entropy: Float[Tensor, " R"],
    targets: Int[Tensor, " E"],
    target_row: Int[Tensor, " E"],
    grad_logprobs: Float[Tensor, " E"] | None,
    grad_entropy: Float[Tensor, " E"] | None,
) -> Float[Tensor, "R V"]:
    """Gradient of the scaled logits; overwrites `log_weights`.

    With weights p: d logp[t] / d logits = onehot(t) - p, and d H / d logits = -p (log p + H).
    """
    zeros = torch.zeros_like(entropy)
    factor: Tensor | None = None
    if grad_entropy is not None:
        factor = -zeros.index_add(0, target_row, grad_entropy)[:, None]
        factor = factor * (log_weights + entropy[:, None]).nan_to_num_(neginf=0.0)
    if grad_logprobs is not None:
        row_grad = zeros.index_add(0, target_row, grad_logprobs)[:, None]
        factor = -row_grad if factor is None else factor - row_grad
    assert factor is not None, "autograd computes only gradients that something needs"
    grad_logits = log_weights.exp_().mul_(factor)
    if grad_logprobs is not None:
        grad_logits.index_put_((target_row, targets), grad_logprobs, accumulate=True)
    return grad_logits


def consume_logits(
    logits: Float[Tensor, "R V"], entropy_of: EntropyOf
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-sum-exp and entropy of each row; overwrites the logits instead of allocating arrays of their size."""
    top = logits.amax(-1, keepdim=True)
    logits.sub_(top)
    if entropy_of == "none":
        lse = logits.exp_().sum(-1).log_() + top[:, 0]
        return lse, torch.zeros_like(lse)
    weights = logits.exp()
    total = weights.sum(-1)
    # A hidden token (logit -inf) has weight 0 and adds nothing: 0 * -inf must count as 0.
    mean = weights.mul_(logits.nan_to_num_(neginf=0.0)).sum(-1) / total
    return total.log() + top[:, 0], total.log() - mean
