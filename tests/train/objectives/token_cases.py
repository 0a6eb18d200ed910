"""Objectives with one term per token, each with its flat loss."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.train.gradient.case import WIDE, add_case, per_sequence, per_token
from tests.train.objectives.flat_objectives import (
    Data,
    Flat,
    over_tokens,
    surrogate,
    token_ratio,
)
from treering.train.objectives import Objective, cispo, dapo, dr_grpo, grpo, ppo, rloo, sft


def _token_cases() -> None:
    for shared in ("sum", "once"):
        _add_sft(shared)
        for name, make, normalizer, clip in (
            ("grpo", grpo, "sequence_mean", (0.2, 0.2)),
            ("dapo", dapo, "token_mean", (0.2, 0.28)),
            ("dr_grpo", dr_grpo, "sequence_sum", (0.2, 0.2)),
            ("ppo", ppo, "token_mean", (0.2, 0.2)),
        ):
            _add_surrogate(f"{name} {shared}", make, normalizer, clip, shared)
        _add_cispo(shared)
        _add_reinforce(shared)
    higher: Callable[..., Objective] = functools.partial(grpo, clip=(0.1, 0.4))
    _add_surrogate("grpo clip-higher", higher, "sequence_mean", (0.1, 0.4), "sum")
    for normalizer in ("token_mean", "sequence_mean", "sequence_sum", "tree_mean", "sum"):
        named: Callable[..., Objective] = functools.partial(dr_grpo, normalizer=normalizer)
        _add_surrogate(f"dr_grpo by {normalizer}", named, normalizer, (0.2, 0.2), "sum")
    _add_surrogate("dr_grpo by divisor", dr_grpo, "constant", (0.2, 0.2), "sum", divisor=7.0)


def _add_sft(shared: str) -> None:
    add_case(
        f"sft {shared}",
        lambda d: sft(d.masks, shared=shared),  # type: ignore[arg-type]
        lambda d, f: over_tokens(d, lambda i, t: -f.logprobs[i][t - 1], normalizer="token_mean", shared=shared),
    )


def _add_surrogate(
    name: str,
    make: Callable[..., Objective],
    normalizer: str,
    clip: tuple[float, float],
    shared: str,
    **options: Any,
) -> None:
    divisor = options.get("divisor", 1.0)

    def loss(d: Data, f: Flat, advantage: Callable[[Data, int, int], float]) -> Tensor:
        return over_tokens(
            d,
            lambda i, t: surrogate(token_ratio(d, f, i, t), advantage(d, i, t), clip),
            normalizer=normalizer,
            shared=shared,
            divisor=divisor,
        )

    def on_policy(d: Data, f: Flat) -> Tensor:
        return over_tokens(
            d,
            lambda i, t: -d.advantages[i] * torch.exp(f.logprobs[i][t - 1] - f.logprobs[i][t - 1].item()),
            normalizer=normalizer,
            shared=shared,
            divisor=divisor,
        )

    add_case(
        name,
        lambda d: make(d.advantages, d.masks, d.old, shared=shared, **options),
        lambda d, f: loss(d, f, per_sequence),
    )
    add_case(
        f"{name}, advantages per token",
        lambda d: make(d.token_advantages, d.masks, d.old, shared=shared, **options),
        lambda d, f: loss(d, f, per_token),
    )
    add_case(f"{name}, on policy", lambda d: make(d.advantages, d.masks, shared=shared, **options), on_policy)


def _add_cispo(shared: str) -> None:
    def loss(d: Data, f: Flat, advantage: Callable[[Data, int, int], float], low: float, high: float) -> Tensor:
        def term(i: int, t: int) -> Tensor:
            ratio = math.exp(f.logprobs[i][t - 1].item() - d.old[i][t])
            return -min(max(ratio, 1 - low), 1 + high) * advantage(d, i, t) * f.logprobs[i][t - 1]

        return over_tokens(d, term, normalizer="token_mean", shared=shared)

    def make(d: Data, **options: Any) -> Objective:
        return cispo(d.advantages, d.masks, d.old, shared=shared, **options)  # type: ignore[arg-type]

    add_case(f"cispo {shared}", make, lambda d, f: loss(d, f, per_sequence, 1.0, 4.0))
    add_case(f"cispo {shared}, tight", lambda d: make(d, clip=WIDE), lambda d, f: loss(d, f, per_sequence, *WIDE))
    add_case(
        f"cispo {shared}, advantages per token",
        lambda d: cispo(d.token_advantages, d.masks, d.old, WIDE, shared=shared),  # type: ignore[arg-type]
        lambda d, f: loss(d, f, per_token, *WIDE),
    )
    add_case(
        f"cispo {shared}, on policy",
        lambda d: cispo(d.advantages, d.masks, shared=shared),  # type: ignore[arg-type]
        lambda d, f: over_tokens(
            d, lambda i, t: -d.advantages[i] * f.logprobs[i][t - 1], normalizer="token_mean", shared=shared
        ),
    )


def _add_reinforce(shared: str) -> None:
    def loss(d: Data, f: Flat, advantage: Callable[[Data, int, int], float]) -> Tensor:
        return over_tokens(
            d, lambda i, t: -advantage(d, i, t) * f.logprobs[i][t - 1], normalizer="sequence_sum", shared=shared
        )

    add_case(
        f"rloo {shared}, on policy",
        lambda d: rloo(d.advantages, d.masks, shared=shared),  # type: ignore[arg-type]
        lambda d, f: loss(d, f, per_sequence),
    )
    add_case(
        f"rloo {shared}, on policy, advantages per token",
        lambda d: rloo(d.token_advantages, d.masks, shared=shared),  # type: ignore[arg-type]
        lambda d, f: loss(d, f, per_token),
    )


_token_cases()
