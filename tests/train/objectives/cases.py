"""Every objective and option by name, each with its flat loss, for whole and partitioned trees."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.train.flat import surrogate
from tests.train.objectives.flat_objectives import (
    Data,
    Flat,
    over_sequences,
    over_tokens,
    sequence_log_ratio,
    sum_of,
)
from treering.objectives import Objective, cispo, dapo, dpo, dr_grpo, grpo, gspo, ppo, rloo, sft

WIDE = (0.15, 0.25)
BOUNDS = (0.8, 1.3)
"""Bounds of importance weights; the lower one applies only to masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    make: Callable[[Data], Objective]
    loss: Callable[[Data, Flat], Tensor]
    needs_value_head: bool = False


BASES: dict[str, tuple[Callable[..., Objective], str, tuple[float, float]]] = {
    "grpo": (grpo, "sequence_mean", (0.2, 0.2)),
    "dapo": (dapo, "token_mean", (0.2, 0.28)),
    "dr_grpo": (dr_grpo, "sequence_sum", (0.2, 0.2)),
    "ppo": (ppo, "token_mean", (0.2, 0.2)),
    "cispo": (cispo, "token_mean", (1.0, 4.0)),
    "gspo": (gspo, "sequence_mean", (3e-4, 4e-4)),
    "rloo": (rloo, "sequence_sum", (0.2, 0.2)),
}
"""Policy objectives: maker, default normaliser, default clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy objective with some of its options; None and 0 disable an option."""

    name: str
    shared: str = "sum"
    clip: tuple[float, float] | None = None
    is_per_token: bool = False
    is_on_policy: bool = False
    kl: float = 0.0
    kl_estimator: str | None = None
    entropy: float = 0.0
    importance: str | None = None
    normalizer: str | None = None
    divisor: float | None = None
    value_coefficient: float = 0.0
    value_clip: float | None = None

    def case(self) -> Case:
        return Case(make=self.make, loss=self.loss, needs_value_head=self.value_coefficient > 0)

    def make(self, d: Data) -> Objective:
        options: dict[str, Any] = {"shared": self.shared, "clip": self.clip, "normalizer": self.normalizer}
        options |= {"divisor": self.divisor, "entropy_coefficient": self.entropy or None}
        if self.kl:
            options |= {"ref_logprobs": d.ref, "kl_coefficient": self.kl, "kl_estimator": self.kl_estimator}
        if self.importance:
            options |= {"behaviour_logprobs": d.behaviour, "importance": self.importance, "max_importance": BOUNDS[1]}
            options["min_importance"] = BOUNDS[0] if self.importance.endswith("mask") else None
        if self.value_coefficient:
            options |= {"returns": d.returns, "value_coefficient": self.value_coefficient}
        if self.value_clip:
            options |= {"old_values": d.old_values, "value_clip": self.value_clip}
        given = {name: value for name, value in options.items() if value is not None}
        advantages = d.token_advantages if self.is_per_token else d.advantages
        return BASES[self.name][0](advantages, d.masks, None if self.is_on_policy else d.old_logprobs, **given)

    def loss(self, d: Data, f: Flat) -> Tensor:
        def term(i: int, t: int) -> Tensor:
            found = self._weight(d, f, i, t) * self._plain(d, f, i, t)
            if self.kl:
                found = found + self.kl * kl(d, f, i, t, self.kl_estimator or "k3")
            return found - self.entropy * f.entropies[i][t - 1] + self.value_coefficient * self._value_loss(d, f, i, t)

        normalizer = self.normalizer or ("constant" if self.divisor else BASES[self.name][1])
        return over_tokens(d, term, normalizer=normalizer, shared=self.shared, divisor=self.divisor or 1.0)

    def _plain(self, d: Data, f: Flat, i: int, t: int) -> Tensor:
        """Return the policy loss of one token; only its own part of a sequence ratio has a gradient."""
        logprob, positions = f.logprobs[i][t - 1], d.trained(i) if self.name in ("gspo", "rloo") else [t]
        advantage = d.token_advantages[i][t] if self.is_per_token else d.advantages[i]
        low, high = clip = self.clip or BASES[self.name][2]
        own = logprob - logprob.item()
        total = 0.0 if self.is_on_policy else sum(f.logprobs[i][u - 1].item() - d.old_logprobs[i][u] for u in positions)
        if self.name == "cispo":
            return -min(max(math.exp(total), 1 - low), 1 + high) * advantage * logprob
        if self.name == "rloo":
            if self.is_on_policy:
                return -advantage * logprob
            return surrogate(torch.exp(total + len(positions) * own), advantage, clip) / len(positions)
        return surrogate(torch.exp(total / len(positions) + own), advantage, clip)

    def _weight(self, d: Data, f: Flat, i: int, t: int) -> float:
        if self.importance is None:
            return 1.0
        positions = d.trained(i) if self.importance.startswith("sequence") else [t]
        target = [f.logprobs[i][u - 1].item() if self.is_on_policy else d.old_logprobs[i][u] for u in positions]
        ratio = math.exp(sum(target) - sum(d.behaviour[i][u] for u in positions))
        if self.importance.endswith("truncate"):
            return min(ratio, BOUNDS[1])
        return ratio if BOUNDS[0] <= ratio <= BOUNDS[1] else 0.0

    def _value_loss(self, d: Data, f: Flat, i: int, t: int) -> Tensor:
        value, wanted, old = f.values[i][t - 1], d.returns[i][t], d.old_values[i][t]
        if not self.value_coefficient:
            return torch.zeros_like(value)
        error = (value - wanted) ** 2
        if self.value_clip:
            error = torch.max(error, (torch.clamp(value, old - self.value_clip, old + self.value_clip) - wanted) ** 2)
        return error / 2


def kl(d: Data, f: Flat, i: int, t: int, estimator: str) -> Tensor:
    """Estimate the KL divergence; k3 is equation 4 of the GRPO paper."""
    log_ratio = f.logprobs[i][t - 1] - d.ref[i][t]
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(-log_ratio) + log_ratio - 1}[estimator]


def _policy_cases() -> dict[str, Case]:
    found: dict[str, Policy] = {}
    for name in BASES:
        is_of_tokens = name not in ("gspo", "rloo")
        for shared in ("sum", "once") if is_of_tokens else ("sum",):
            one = functools.partial(Policy, name=name, shared=shared)
            found[f"{name} {shared}"] = one()
            found[f"{name} {shared}, on policy, per token"] = one(is_on_policy=True, is_per_token=True)
            options = {"kl": 0.3, "entropy": 0.1, "importance": "token_mask"}
            found[f"{name} {shared}, all options"] = one(clip=WIDE, is_per_token=True, **options)
    for name, mode in (("grpo", "token_truncate"), ("gspo", "sequence_truncate"), ("grpo", "sequence_mask")):
        found[f"{name}, {mode}"] = Policy(name=name, importance=mode, clip=WIDE)
    found["rloo on policy, sequence_mask"] = Policy(name="rloo", importance="sequence_mask", is_on_policy=True)
    found["rloo once, on policy"] = Policy(name="rloo", shared="once", is_on_policy=True, is_per_token=True)
    for estimator in ("k1", "k2"):
        found[f"grpo, {estimator}"] = Policy(name="grpo", kl=0.7, kl_estimator=estimator)
    for normalizer in ("token_mean", "sequence_mean", "tree_mean", "sum"):
        found[f"dr_grpo by {normalizer}"] = Policy(name="dr_grpo", normalizer=normalizer)
    found["dr_grpo by divisor"] = Policy(name="dr_grpo", divisor=7.0)
    for shared in ("sum", "once"):
        found[f"ppo values {shared}"] = Policy(name="ppo", shared=shared, value_coefficient=0.5, is_per_token=True)
    found["ppo clipped values, entropy, kl"] = Policy(
        name="ppo", value_coefficient=0.8, value_clip=0.3, entropy=0.1, kl=0.2
    )
    return {name: policy.case() for name, policy in found.items()}


def _sft(shared: str) -> Case:
    return Case(
        make=lambda d: sft(d.masks, shared=shared),  # type: ignore[arg-type]
        loss=lambda d, f: over_tokens(d, lambda i, t: -f.logprobs[i][t - 1], normalizer="token_mean", shared=shared),
    )


def _of_ratios(make: Callable[..., Objective], *, is_mean: bool) -> Case:
    """Return a case with a whole-sequence ratio as in its paper, whose gradient covers all its tokens."""

    def term(d: Data, f: Flat, i: int) -> Tensor:
        total = sequence_log_ratio(d, f, i)
        return surrogate(torch.exp(total / len(d.trained(i)) if is_mean else total), d.advantages[i], WIDE)

    return Case(
        make=lambda d: make(d.advantages, d.masks, d.old_logprobs, WIDE),
        loss=lambda d, f: over_sequences(d, lambda i: term(d, f, i)),
    )


def _dpo(reference: str | None, of_margin: Callable[[Tensor], Tensor], **options: Any) -> Case:
    def of_branch(d: Data, i: int) -> float:
        if reference is None or not d.trained(i):
            return 0.0
        is_sum = reference == "ref_sums" or (reference == "mixed_ref" and i % 2)
        return d.ref_sums[i] if is_sum else sum(d.ref[i][t] for t in d.trained(i))

    def loss(d: Data, f: Flat) -> Tensor:
        ratios = [sum_of(f.logprobs[i][t - 1] for t in d.trained(i)) - of_branch(d, i) for i in range(len(d.masks))]
        return sum_of(of_margin(ratios[c] - ratios[r]) for c, r in d.pairs) / max(len(d.pairs), 1)

    return Case(
        make=lambda d: dpo(d.pairs, d.masks, None if reference is None else getattr(d, reference), **options), loss=loss
    )


def _sigmoid(margin: Tensor, beta: float = 0.5, wrong: float = 0.0) -> Tensor:
    right = torch.log(1 / (1 + torch.exp(-beta * margin)))
    return -(1 - wrong) * right - wrong * torch.log(1 / (1 + torch.exp(beta * margin)))


CASES: dict[str, Case] = {
    "sft sum": _sft("sum"),
    "sft once": _sft("once"),
    **_policy_cases(),
    "gspo as in its paper": _of_ratios(gspo, is_mean=True),
    "rloo as in its paper": _of_ratios(rloo, is_mean=False),
    "dpo": _dpo(None, functools.partial(_sigmoid, beta=0.1)),
    "dpo per token": _dpo("ref", _sigmoid, beta=0.5),
    "dpo sums": _dpo("ref_sums", _sigmoid, beta=0.5),
    "dpo mixed": _dpo("mixed_ref", _sigmoid, beta=0.5),
    "dpo smooth": _dpo("ref", functools.partial(_sigmoid, wrong=0.2), beta=0.5, label_smoothing=0.2),
    "dpo hinge": _dpo("ref", lambda margin: torch.clamp(1 - 0.5 * margin, min=0), beta=0.5, loss_type="hinge"),
    "dpo ipo": _dpo("ref", lambda margin: (margin - 1 / (2 * 0.5)) ** 2, beta=0.5, loss_type="ipo"),
}
