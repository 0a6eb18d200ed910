"""Value losses and the options of all policy objectives, each with its flat loss."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.train.gradient.case import CASES, WIDE, Case, add_case, entropy, k1, k2, k3
from tests.train.objectives.flat_objectives import (
    Data,
    Flat,
    over_tokens,
    sequence_log_ratio,
    surrogate,
    token_ratio,
)
from treering.train.objectives import Objective, cispo, dapo, dr_grpo, grpo, gspo, ppo, rloo


def _value_cases() -> None:
    def plain(d: Data, f: Flat, i: int, t: int) -> Tensor:
        return (f.values[i][t - 1] - d.returns[i][t]) ** 2

    def bounded(d: Data, f: Flat, i: int, t: int) -> Tensor:
        old = d.old_values[i][t]
        value = torch.clamp(f.values[i][t - 1], old - 0.3, old + 0.3)
        return torch.max(plain(d, f, i, t), (value - d.returns[i][t]) ** 2)

    def loss(
        d: Data, f: Flat, error: Callable[[Data, Flat, int, int], Tensor], factor: float, shared: str = "sum"
    ) -> Tensor:
        def term(i: int, t: int) -> Tensor:
            policy = surrogate(token_ratio(d, f, i, t), d.token_advantages[i][t], (0.2, 0.2))
            return policy + factor * 0.5 * error(d, f, i, t)

        return over_tokens(d, term, normalizer="token_mean", shared=shared)

    def make(d: Data, **options: Any) -> Objective:
        return ppo(d.token_advantages, d.masks, d.old, returns=d.returns, **options)

    for shared in ("sum", "once"):
        add_case(
            f"ppo values {shared}",
            lambda d, s=shared: make(d, shared=s),
            lambda d, f, s=shared: loss(d, f, plain, 0.5, s),
            needs_value_head=True,
        )
    add_case(
        "ppo clipped values",
        lambda d: make(d, old_values=d.old_values, value_clip=0.3, value_coefficient=0.8),
        lambda d, f: loss(d, f, bounded, 0.8),
        needs_value_head=True,
    )
    add_case(
        "ppo values, entropy, kl",
        lambda d: make(d, entropy_coefficient=0.1, ref_logprobs=d.ref, kl_coefficient=0.2),
        lambda d, f: loss(d, f, lambda *at: plain(*at) + 4 * (0.2 * k3(*at) - 0.1 * entropy(*at)), 0.5),
        needs_value_head=True,
    )


BASES: dict[str, tuple[Callable[..., Objective], str, bool]] = {
    "grpo": (grpo, "sequence_mean", True),
    "dapo": (dapo, "token_mean", True),
    "dr_grpo": (dr_grpo, "sequence_sum", True),
    "ppo": (ppo, "token_mean", True),
    "cispo": (cispo, "token_mean", True),
    "gspo": (gspo, "sequence_mean", False),
    "rloo": (rloo, "sequence_sum", False),
}
"""Policy objectives: maker, default normaliser, whether a term is a token's own so that `once` is allowed."""


def _plain_term(name: str, d: Data, f: Flat, i: int, t: int) -> Tensor:
    """The term of one token with clip WIDE, written per token even where the ratio is a sequence's."""
    logprob, advantage = f.logprobs[i][t - 1], d.advantages[i]
    own = logprob - logprob.item()
    places = d.trained(i)
    if name == "cispo":
        ratio = token_ratio(d, f, i, t).item()
        return -min(max(ratio, 1 - WIDE[0]), 1 + WIDE[1]) * advantage * logprob
    if name == "gspo":
        return surrogate(torch.exp(sequence_log_ratio(d, f, i).item() / len(places) + own), advantage, WIDE)
    if name == "rloo":
        rho = torch.exp(sequence_log_ratio(d, f, i).item() + len(places) * own)
        return surrogate(rho, advantage, WIDE) / len(places)
    return surrogate(token_ratio(d, f, i, t), advantage, WIDE)


def _option_cases() -> None:
    for name, (make, normalizer, has_once) in BASES.items():
        for shared in ("sum", "once") if has_once else ("sum",):
            _add_regularizers(name, make, normalizer, shared)
            _add_importance(name, make, normalizer, shared)
    for name in ("grpo", "rloo"):
        _add_importance_on_policy(name)


def _add_regularizers(name: str, make: Callable[..., Objective], normalizer: str, shared: str) -> None:
    def added(options: dict[str, Any], extra: Callable[[Data, Flat, int, int], Tensor]) -> Case:
        def loss(d: Data, f: Flat) -> Tensor:
            return over_tokens(
                d,
                lambda i, t: _plain_term(name, d, f, i, t) + extra(d, f, i, t),
                normalizer=normalizer,
                shared=shared,
            )

        def made(d: Data) -> Objective:
            reference = {"ref_logprobs": d.ref} if "kl_coefficient" in options else {}
            return make(d.advantages, d.masks, d.old, WIDE, shared=shared, **options, **reference)

        return Case(make=made, loss=loss)

    for estimator, kl in (("k1", k1), ("k2", k2), ("k3", k3)):
        options = {"kl_coefficient": 0.3, "kl_estimator": estimator}
        CASES[f"{name} {shared}, kl {estimator}"] = added(options, lambda *at, kl=kl: 0.3 * kl(*at))
    CASES[f"{name} {shared}, kl"] = added({"kl_coefficient": 0.7}, lambda *at: 0.7 * k3(*at))
    CASES[f"{name} {shared}, entropy"] = added({"entropy_coefficient": 0.2}, lambda *at: -0.2 * entropy(*at))
    CASES[f"{name} {shared}, kl and entropy"] = added(
        {"entropy_coefficient": 0.1, "kl_coefficient": 0.3}, lambda *at: 0.3 * k3(*at) - 0.1 * entropy(*at)
    )


def _weight(d: Data, mode: str, i: int, t: int, target: Callable[[int], float], bounds: tuple[float, float]) -> float:
    places = d.trained(i) if mode.startswith("sequence") else [t]
    ratio = math.exp(sum(target(u) - d.behaviour[i][u] for u in places))
    if mode.endswith("truncate"):
        return min(ratio, bounds[1])
    return ratio if bounds[0] <= ratio <= bounds[1] else 0.0


def _add_importance(name: str, make: Callable[..., Objective], normalizer: str, shared: str) -> None:
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        if shared == "once" and mode.startswith("sequence"):
            continue
        bounds = (0.8, 1.3)

        def loss(d: Data, f: Flat, mode: str = mode, bounds: tuple[float, float] = bounds) -> Tensor:
            def term(i: int, t: int) -> Tensor:
                weight = _weight(d, mode, i, t, lambda u: d.old[i][u], bounds)
                return weight * _plain_term(name, d, f, i, t) + 0.3 * k3(d, f, i, t)

            return over_tokens(d, term, normalizer=normalizer, shared=shared)

        def made(d: Data, mode: str = mode, bounds: tuple[float, float] = bounds) -> Objective:
            lower = {"min_importance": bounds[0]} if mode.endswith("mask") else {}
            options = {"importance": mode, "max_importance": bounds[1], "behaviour_logprobs": d.behaviour, **lower}
            penalty = {"ref_logprobs": d.ref, "kl_coefficient": 0.3}
            return make(d.advantages, d.masks, d.old, WIDE, shared=shared, **options, **penalty)

        add_case(f"{name} {shared}, {mode} and kl", made, loss)


def _add_importance_on_policy(name: str) -> None:
    make, normalizer, _ = BASES[name]
    for mode in ("token_truncate", "sequence_truncate", "sequence_mask"):

        def loss(d: Data, f: Flat, mode: str = mode) -> Tensor:
            def term(i: int, t: int) -> Tensor:
                weight = _weight(d, mode, i, t, lambda u: f.logprobs[i][u - 1].item(), (0.0, 1.2))
                logprob = f.logprobs[i][t - 1]
                plain = logprob if name == "rloo" else torch.exp(logprob - logprob.item())
                return -weight * d.advantages[i] * plain

            return over_tokens(d, term, normalizer=normalizer)

        add_case(
            f"{name} on policy, {mode}",
            lambda d, mode=mode: make(
                d.advantages, d.masks, behaviour_logprobs=d.behaviour, max_importance=1.2, importance=mode
            ),
            loss,
        )


_value_cases()
_option_cases()
