"""Importance sampling weights for tokens that were sampled from another distribution than the trained one.

F flat entries
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treering.errors import ConfigError
from treering.train.objective import branch_sums

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""Which ratio is bounded, and how. token: each token's own. sequence: the product over the trained tokens of a branch,
used for each of them. truncate: a ratio above the cap becomes the cap. mask: one outside the bounds becomes 0."""

MAX_LOG_IMPORTANCE = 20.0
"""Log-weights are clamped to this, as in verl: 5e8 is above any cap in use and finite in every float format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How to weight terms by exp(target log-prob - behaviour log-prob), detached.

    The names and the sequence's product are those of TRL (verl calls them `token` and `sequence`, truncated or
    rejected).

    Attributes:
        max_importance: cap, or upper bound of a mask; positive, may be infinite.
        min_importance: lower bound of a mask; 0 for none.
        mode: see `ImportanceMode`.
    """

    max_importance: float
    min_importance: float = 0.0
    mode: ImportanceMode = "token_truncate"

    def __post_init__(self) -> None:
        if self.mode not in get_args(ImportanceMode):
            raise ConfigError(f"importance is one of {', '.join(get_args(ImportanceMode))}, got {self.mode!r}")
        if not _is_number(self.max_importance) or self.max_importance <= 0:
            raise ConfigError(f"max_importance is a positive number, got {self.max_importance!r}; 2.0 is common")
        if not _is_number(self.min_importance) or not 0 <= self.min_importance <= self.max_importance:
            raise ConfigError(
                f"min_importance is a number from 0 to max_importance={self.max_importance}, got "
                f"{self.min_importance!r}; 0.5 is common"
            )
        if self.min_importance > 0 and not self.mode.endswith("_mask"):
            raise ConfigError(
                f"min_importance bounds a mask, and importance={self.mode!r} only caps; leave it out, or choose "
                "token_mask or sequence_mask"
            )

    @property
    def is_of_sequences(self) -> bool:
        """Whether a weight depends on all trained tokens of a branch."""
        return self.mode.startswith("sequence_")

    def weights(
        self,
        target_logprobs: Float[Tensor, " F"],
        behaviour_logprobs: Float[Tensor, " F"],
        *,
        branch: Int[Tensor, " F"],
        num_branches: int,
    ) -> Float[Tensor, " F"]:
        """The weight of each entry, without a gradient.

        Args:
            target_logprobs: of the trained policy.
            behaviour_logprobs: of the distribution that the tokens were sampled from.
            branch: ascending branch numbers.
            num_branches: number of branches.

        Example: log-probs [-1, -1] of a branch whose tokens were sampled at [-1.5, -3] have the ratios 1.649 and 7.389
        and the product 12.18. With max_importance=2, token_truncate gives [1.649, 2], token_mask [1.649, 0],
        sequence_truncate [2, 2] and sequence_mask [0, 0].
        """
        log_ratio = (target_logprobs - behaviour_logprobs).detach()
        if self.is_of_sequences:
            log_ratio = branch_sums(log_ratio, branch, num_branches)[branch]
        ratio = torch.exp(log_ratio.clamp(-MAX_LOG_IMPORTANCE, MAX_LOG_IMPORTANCE))
        if self.mode.endswith("_truncate"):
            return ratio.clamp(max=self.max_importance)
        is_outside = (ratio < self.min_importance) | (ratio > self.max_importance)
        return ratio.masked_fill(is_outside, 0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
