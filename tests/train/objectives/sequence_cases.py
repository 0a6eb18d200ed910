"""Objectives of whole sequences and of pairs, each with its flat loss."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.train.gradient.case import WIDE, add_case
from tests.train.objectives.flat_objectives import (
    Data,
    Flat,
    constant,
    over_sequences,
    sequence_log_ratio,
    sum_of,
    surrogate,
)
from treering.train.objectives import dpo, gspo, rloo


def _sequence_cases() -> None:
    for clip in ((3e-4, 4e-4), WIDE):
        add_case(f"gspo clip {clip}", lambda d, c=clip: gspo(d.advantages, d.masks, d.old, c), _gspo(clip))
        add_case(
            f"gspo clip {clip}, advantages per token",
            lambda d, c=clip: gspo(d.token_advantages, d.masks, d.old, c),
            _gspo_token(clip),
        )
    add_case(
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
    add_case(
        "rloo",
        lambda d: rloo(d.advantages, d.masks, d.old),
        lambda d, f: over_sequences(
            d, lambda i: surrogate(torch.exp(sequence_log_ratio(d, f, i)), d.advantages[i], (0.2, 0.2))
        ),
    )
    add_case("rloo, advantages per token", lambda d: rloo(d.token_advantages, d.masks, d.old, (0.6, 0.8)), _rloo_token)


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

    add_case("dpo", lambda d: dpo(d.pairs, d.masks), lambda d, f: loss(d, f, no_reference, sigmoid(0.1)))
    add_case(
        "dpo per token", lambda d: dpo(d.pairs, d.masks, d.ref, 0.5), lambda d, f: loss(d, f, per_token, sigmoid(0.5))
    )
    add_case("dpo sums", lambda d: dpo(d.pairs, d.masks, d.ref_sums, 0.5), lambda d, f: loss(d, f, sums, sigmoid(0.5)))
    add_case(
        "dpo mixed", lambda d: dpo(d.pairs, d.masks, d.mixed_ref, 0.5), lambda d, f: loss(d, f, mixed, sigmoid(0.5))
    )
    add_case(
        "dpo smooth",
        lambda d: dpo(d.pairs, d.masks, d.ref, 0.5, label_smoothing=0.2),
        lambda d, f: loss(d, f, per_token, sigmoid(0.5, 0.2)),
    )
    add_case(
        "dpo hinge",
        lambda d: dpo(d.pairs, d.masks, d.ref, 0.5, loss_type="hinge"),
        lambda d, f: loss(d, f, per_token, lambda m: torch.clamp(1 - 0.5 * m, min=0)),
    )
    add_case(
        "dpo ipo",
        lambda d: dpo(d.pairs, d.masks, d.ref, 0.5, loss_type="ipo"),
        lambda d, f: loss(d, f, per_token, lambda m: (m - 1 / (2 * 0.5)) ** 2),
    )


_sequence_cases()
_preference_cases()
