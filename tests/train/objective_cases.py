"""Every objective and option by name, each beside its flat loss: what whole and partitioned trees must pass."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.train.flat_objectives import (
    Data,
    Flat,
    constant,
    over_sequences,
    over_tokens,
    sequence_log_ratio,
    sum_of,
    surrogate,
    token_ratio,
)
from treering.train.objectives import Objective, cispo, dapo, dpo, dr_grpo, grpo, gspo, ppo, rloo, sft


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An objective and what it should be."""

    make: Callable[[Data], Objective]
    loss: Callable[[Data, Flat], Tensor]
    needs_value_head: bool = False


WIDE = (0.15, 0.25)
CASES: dict[str, Case] = {}


def _case(name: str, make: Callable[[Data], Objective], loss: Callable[[Data, Flat], Tensor], **more: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(make=make, loss=loss, **more)


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
    _case(
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

    _case(
        name,
        lambda d: make(d.advantages, d.masks, d.old, shared=shared, **options),
        lambda d, f: loss(d, f, per_sequence),
    )
    _case(
        f"{name}, advantages per token",
        lambda d: make(d.token_advantages, d.masks, d.old, shared=shared, **options),
        lambda d, f: loss(d, f, per_token),
    )
    _case(f"{name}, on policy", lambda d: make(d.advantages, d.masks, shared=shared, **options), on_policy)


def per_sequence(d: Data, i: int, t: int) -> float:
    return d.advantages[i]


def per_token(d: Data, i: int, t: int) -> float:
    return d.token_advantages[i][t]


def _add_cispo(shared: str) -> None:
    def loss(d: Data, f: Flat, advantage: Callable[[Data, int, int], float], low: float, high: float) -> Tensor:
        def term(i: int, t: int) -> Tensor:
            ratio = math.exp(f.logprobs[i][t - 1].item() - d.old[i][t])
            return -min(max(ratio, 1 - low), 1 + high) * advantage(d, i, t) * f.logprobs[i][t - 1]

        return over_tokens(d, term, normalizer="token_mean", shared=shared)

    def make(d: Data, **options: Any) -> Objective:
        return cispo(d.advantages, d.masks, d.old, shared=shared, **options)  # type: ignore[arg-type]

    _case(f"cispo {shared}", make, lambda d, f: loss(d, f, per_sequence, 1.0, 4.0))
    _case(f"cispo {shared}, tight", lambda d: make(d, clip=WIDE), lambda d, f: loss(d, f, per_sequence, *WIDE))
    _case(
        f"cispo {shared}, advantages per token",
        lambda d: cispo(d.token_advantages, d.masks, d.old, WIDE, shared=shared),  # type: ignore[arg-type]
        lambda d, f: loss(d, f, per_token, *WIDE),
    )
    _case(
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

    _case(
        f"rloo {shared}, on policy",
        lambda d: rloo(d.advantages, d.masks, shared=shared),  # type: ignore[arg-type]
        lambda d, f: loss(d, f, per_sequence),
    )
    _case(
        f"rloo {shared}, on policy, advantages per token",
        lambda d: rloo(d.token_advantages, d.masks, shared=shared),  # type: ignore[arg-type]
        lambda d, f: loss(d, f, per_token),
    )


def _sequence_cases() -> None:
    for clip in ((3e-4, 4e-4), WIDE):
        _case(f"gspo clip {clip}", lambda d, c=clip: gspo(d.advantages, d.masks, d.old, c), _gspo(clip))
        _case(
            f"gspo clip {clip}, advantages per token",
            lambda d, c=clip: gspo(d.token_advantages, d.masks, d.old, c),
            _gspo_token(clip),
        )
    _case(
        "gspo, on policy",
        lambda d: gspo(d.advantages, d.masks),
        lambda d, f: over_sequences(
            d,
            lambda i: (
                -d.advantages[i]
                * torch.exp(
                    sum_of(f.logprobs[i][t - 1] - f.logprobs[i][t - 1].item() for t in d.trained(i)) / len(d.trained(i))
                )
            ),
        ),
    )
    _case(
        "rloo",
        lambda d: rloo(d.advantages, d.masks, d.old),
        lambda d, f: over_sequences(
            d, lambda i: surrogate(torch.exp(sequence_log_ratio(d, f, i)), d.advantages[i], (0.2, 0.2))
        ),
    )
    _case("rloo, advantages per token", lambda d: rloo(d.token_advantages, d.masks, d.old, (0.6, 0.8)), _rloo_token)


def _gspo(clip: tuple[float, float]) -> Callable[[Data, Flat], Tensor]:
    def term(d: Data, f: Flat, i: int) -> Tensor:
        ratio = torch.exp(sequence_log_ratio(d, f, i) / len(d.trained(i)))
        return surrogate(ratio, d.advantages[i], clip)

    return lambda d, f: over_sequences(d, lambda i: term(d, f, i))


def _gspo_token(clip: tuple[float, float]) -> Callable[[Data, Flat], Tensor]:
    """Equation 13 of the paper as it is written: the ratio's value is the sequence's, its gradient the token's."""

    def term(d: Data, f: Flat, i: int) -> Tensor:
        ratio = math.exp(sequence_log_ratio(d, f, i).item() / len(d.trained(i)))
        terms = []
        for t in d.trained(i):
            probability = torch.exp(f.logprobs[i][t - 1])
            terms.append(surrogate(ratio * probability / probability.item(), d.token_advantages[i][t], clip))
        return sum_of(terms) / len(terms)

    return lambda d, f: over_sequences(d, lambda i: term(d, f, i))


def _rloo_token(d: Data, f: Flat) -> Tensor:
    """The value is the mean over tokens of the clipped surrogate; where unclipped, the gradient is rho A logp'."""

    def term(i: int) -> Tensor:
        rho = math.exp(sequence_log_ratio(d, f, i).item())
        bounded = min(max(rho, 0.4), 1.8)
        terms = []
        for t in d.trained(i):
            advantage, logprob = d.token_advantages[i][t], f.logprobs[i][t - 1]
            value = constant(-min(rho * advantage, bounded * advantage) / len(d.trained(i)))
            is_cut = (rho < 0.4 and advantage < 0) or (rho > 1.8 and advantage > 0)
            terms.append(value if is_cut else value - rho * advantage * (logprob - logprob.item()))
        return sum_of(terms)

    return over_sequences(d, term)


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
        _case(
            f"ppo values {shared}",
            lambda d, s=shared: make(d, shared=s),
            lambda d, f, s=shared: loss(d, f, plain, 0.5, s),
            needs_value_head=True,
        )
    _case(
        "ppo clipped values",
        lambda d: make(d, old_values=d.old_values, value_clip=0.3, value_coefficient=0.8),
        lambda d, f: loss(d, f, bounded, 0.8),
        needs_value_head=True,
    )
    _case(
        "ppo values, entropy, kl",
        lambda d: make(d, entropy_coefficient=0.1, ref_logprobs=d.ref, kl_coefficient=0.2),
        lambda d, f: loss(d, f, lambda *at: plain(*at) + 4 * (0.2 * _k3(*at) - 0.1 * _entropy(*at)), 0.5),
        needs_value_head=True,
    )


def _k1(d: Data, f: Flat, i: int, t: int) -> Tensor:
    return f.logprobs[i][t - 1] - d.ref[i][t]


def _k2(d: Data, f: Flat, i: int, t: int) -> Tensor:
    return _k1(d, f, i, t) ** 2 / 2


def _k3(d: Data, f: Flat, i: int, t: int) -> Tensor:
    """Equation 4 of the GRPO paper."""
    log_ratio = d.ref[i][t] - f.logprobs[i][t - 1]
    return torch.exp(log_ratio) - log_ratio - 1


def _entropy(d: Data, f: Flat, i: int, t: int) -> Tensor:
    return f.entropies[i][t - 1]


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

    for estimator, kl in (("k1", _k1), ("k2", _k2), ("k3", _k3)):
        options = {"kl_coefficient": 0.3, "kl_estimator": estimator}
        CASES[f"{name} {shared}, kl {estimator}"] = added(options, lambda *at, kl=kl: 0.3 * kl(*at))
    CASES[f"{name} {shared}, kl"] = added({"kl_coefficient": 0.7}, lambda *at: 0.7 * _k3(*at))
    CASES[f"{name} {shared}, entropy"] = added({"entropy_coefficient": 0.2}, lambda *at: -0.2 * _entropy(*at))
    CASES[f"{name} {shared}, kl and entropy"] = added(
        {"entropy_coefficient": 0.1, "kl_coefficient": 0.3}, lambda *at: 0.3 * _k3(*at) - 0.1 * _entropy(*at)
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
                return weight * _plain_term(name, d, f, i, t) + 0.3 * _k3(d, f, i, t)

            return over_tokens(d, term, normalizer=normalizer, shared=shared)

        def made(d: Data, mode: str = mode, bounds: tuple[float, float] = bounds) -> Objective:
            lower = {"min_importance": bounds[0]} if mode.endswith("mask") else {}
            options = {"importance": mode, "max_importance": bounds[1], "behaviour_logprobs": d.behaviour, **lower}
            penalty = {"ref_logprobs": d.ref, "kl_coefficient": 0.3}
            return make(d.advantages, d.masks, d.old, WIDE, shared=shared, **options, **penalty)

        _case(f"{name} {shared}, {mode} and kl", made, loss)


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

        _case(
            f"{name} on policy, {mode}",
            lambda d, mode=mode: make(
                d.advantages, d.masks, behaviour_logprobs=d.behaviour, max_importance=1.2, importance=mode
            ),
            loss,
        )


def _preference_cases() -> None:
    def no_reference(d: Data, i: int) -> float:
        return 0.0

    def per_token(d: Data, i: int) -> float:
        return sum(d.ref[i][t] for t in d.trained(i))

    def sums(d: Data, i: int) -> float:
        return d.ref_sums[i] if d.trained(i) else 0.0

    def mixed(d: Data, i: int) -> float:
        return sums(d, i) if i % 2 else per_token(d, i)

    def loss(
        d: Data, f: Flat, reference: Callable[[Data, int], float], of_margin: Callable[[Tensor], Tensor]
    ) -> Tensor:
        def log_ratio(i: int) -> Tensor:
            return sum_of(f.logprobs[i][t - 1] for t in d.trained(i)) - reference(d, i)

        return sum_of(of_margin(log_ratio(c) - log_ratio(r)) for c, r in d.pairs) / max(len(d.pairs), 1)

    def sigmoid(beta: float, wrong: float = 0.0) -> Callable[[Tensor], Tensor]:
        return lambda m: (
            -(1 - wrong) * torch.log(1 / (1 + torch.exp(-beta * m))) - wrong * torch.log(1 / (1 + torch.exp(beta * m)))
        )

    _case("dpo", lambda d: dpo(d.pairs, d.masks), lambda d, f: loss(d, f, no_reference, sigmoid(0.1)))
    _case(
        "dpo per token", lambda d: dpo(d.pairs, d.masks, d.ref, 0.5), lambda d, f: loss(d, f, per_token, sigmoid(0.5))
    )
    _case("dpo sums", lambda d: dpo(d.pairs, d.masks, d.ref_sums, 0.5), lambda d, f: loss(d, f, sums, sigmoid(0.5)))
    _case("dpo mixed", lambda d: dpo(d.pairs, d.masks, d.mixed_ref, 0.5), lambda d, f: loss(d, f, mixed, sigmoid(0.5)))
    _case(
        "dpo smooth",
        lambda d: dpo(d.pairs, d.masks, d.ref, 0.5, label_smoothing=0.2),
        lambda d, f: loss(d, f, per_token, sigmoid(0.5, 0.2)),
    )
    _case(
        "dpo hinge",
        lambda d: dpo(d.pairs, d.masks, d.ref, 0.5, loss_type="hinge"),
        lambda d, f: loss(d, f, per_token, lambda m: torch.clamp(1 - 0.5 * m, min=0)),
    )
    _case(
        "dpo ipo",
        lambda d: dpo(d.pairs, d.masks, d.ref, 0.5, loss_type="ipo"),
        lambda d, f: loss(d, f, per_token, lambda m: (m - 1 / (2 * 0.5)) ** 2),
    )


_token_cases()
_sequence_cases()
_value_cases()
_option_cases()
_preference_cases()
