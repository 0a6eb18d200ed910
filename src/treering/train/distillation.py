"""A teacher of an objective, and the divergence from it that the objective reads.

K branches   T tokens of one   k tokens per state
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from treering.errors import InputError
from treering.model.distillation.divergence import DivergenceKind

GivenScores = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids and log-probs of one branch, [T, k] each: entry t is of the distribution that token t was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distillation:
    """A teacher and how the student is compared with it.

    Attributes:
        teacher: a model, or the scores of K branches.
        kind: of the divergence.
        beta: see `Divergence`.
        temperature: of the divergence; None takes the step's.
        top_k: likeliest tokens per state that a teacher gives; None takes its whole vocabulary.
    """

    teacher: nn.Module | tuple[GivenScores, ...]
    kind: DivergenceKind
    beta: float
    temperature: float | None
    top_k: int | None


def as_given_scores(items: Sequence[Any]) -> tuple[GivenScores, ...]:
    """Scores of K branches as arrays, checked one by one.

    Raises:
        InputError: an item that is no pair of arrays [T, k] of one shape, or another k than the first item's.

    Example: the item ([[0, 0], [7, 8]], [[0, 0], [-0.1, -3.0]]) says that token 1 was 7 with probability 0.905.
    """
    scores = tuple(_as_pair(branch, item) for branch, item in enumerate(items))
    widths = [ids.shape[1] for ids, _ in scores]
    for branch, width in enumerate(widths):
        if width != widths[0]:
            raise InputError(
                f"a teacher gives equally many tokens everywhere, got {width} for branch {branch} and {widths[0]} for "
                "branch 0: cut them to one top k"
            )
    return scores


def _as_pair(branch: int, item: Any) -> GivenScores:
    try:
        ids, logprobs = item
    except (TypeError, ValueError) as error:
        raise InputError(
            f"teacher scores of branch {branch} are a pair (ids, log-probs), got {type(item).__name__}: see "
            "treering.score(...).of_branches"
        ) from error
    arrays = [value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value for value in (ids, logprobs)]
    pair = np.asarray(arrays[0], np.int64), np.asarray(arrays[1], np.float64)
    if pair[0].ndim != 2 or pair[0].shape != pair[1].shape or pair[0].shape[1] == 0:
        raise InputError(
            f"teacher scores of branch {branch} are ids and log-probs [tokens, k] of one shape, got "
            f"{pair[0].shape} and {pair[1].shape}"
        )
    return pair
