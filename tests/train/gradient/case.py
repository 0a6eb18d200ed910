"""A test case of an objective, and the per-token data and penalties that cases share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.train.objectives.flat_objectives import (
    Data,
    Flat,
)
from treering.train.objectives import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An objective and its flat loss."""

    make: Callable[[Data], Objective]
    loss: Callable[[Data, Flat], Tensor]
    needs_value_head: bool = False


WIDE = (0.15, 0.25)
CASES: dict[str, Case] = {}


def add_case(name: str, make: Callable[[Data], Objective], loss: Callable[[Data, Flat], Tensor], **more: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(make=make, loss=loss, **more)


def per_sequence(d: Data, i: int, t: int) -> float:
    return d.advantages[i]


def per_token(d: Data, i: int, t: int) -> float:
    return d.token_advantages[i][t]


def k1(d: Data, f: Flat, i: int, t: int) -> Tensor:
    return f.logprobs[i][t - 1] - d.ref[i][t]


def k2(d: Data, f: Flat, i: int, t: int) -> Tensor:
    return k1(d, f, i, t) ** 2 / 2


def k3(d: Data, f: Flat, i: int, t: int) -> Tensor:
    """Equation 4 of the GRPO paper."""
    log_ratio = d.ref[i][t] - f.logprobs[i][t - 1]
    return torch.exp(log_ratio) - log_ratio - 1


def entropy(d: Data, f: Flat, i: int, t: int) -> Tensor:
    return f.entropies[i][t - 1]
