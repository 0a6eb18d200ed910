"""PPO's clipped surrogate, the core of most policy losses, and the check of its clip range.

F flat entries
"""

import torch
from jaxtyping import Float
from torch import Tensor

from treering.errors import ConfigError
from treering.train.objective import Terms
from treering.train.objectives.regularizers import MAX_LOG_RATIO

Clip = tuple[float, float]
"""(low, high): the ratio is clipped to [1 - low, 1 + high]."""


def clipped_surrogate(
    logprobs: Float[Tensor, " F"], old_logprobs: Float[Tensor, " F"], advantages: Float[Tensor, " F"], *, clip: Clip
) -> Terms:
    """PPO's clipped surrogate per entry, negated (arXiv 1707.06347, equation 7), with its usual metrics.

    Metrics: ratio; approx_kl = r - 1 - log r, which estimates KL(old, new); clip_low and clip_high, the share of
    entries whose gradient the lower or upper clip removes.
    """
    return surrogate_of_ratio(logprobs - old_logprobs, advantages, clip=clip)


def surrogate_of_ratio(log_ratio: Float[Tensor, " F"], advantages: Float[Tensor, " F"], *, clip: Clip) -> Terms:
    """-min(r A, clip(r) A) for ratios r of tokens or sequences, with the metrics of `clipped_surrogate`.

    Example: log r = 0.5 (r = 1.649) and A = 2 with clip (0.2, 0.2) give -min(3.297, 2.4) = -2.4.
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = clip
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        metrics = {
            **ratio_metrics(log_ratio),
            "clip_low": ((ratio < 1 - low) & (advantages < 0)).to(ratio.dtype),
            "clip_high": ((ratio > 1 + high) & (advantages > 0)).to(ratio.dtype),
        }
    return Terms(loss=loss, metrics=metrics)


def ratio_metrics(log_ratio: Float[Tensor, " F"]) -> dict[str, Float[Tensor, " F"]]:
    """The ratio r and r - 1 - log r, without gradients."""
    constant = log_ratio.detach()
    return {"ratio": constant.exp(), "approx_kl": torch.expm1(constant) - constant}


def check_clip(clip: Clip) -> None:
    """Raises ConfigError unless 0 <= low <= 1 and 0 <= high, both finite."""
    is_pair = isinstance(clip, tuple | list) and len(clip) == 2 and all(isinstance(x, int | float) for x in clip)
    if not is_pair or not (0 <= clip[0] <= 1 and 0 <= clip[1] < float("inf")):
        raise ConfigError(f"clip must be (low, high) with 0 <= low <= 1 and high >= 0, got {clip!r}")
