"""Distillation: the divergence of the student's next-token distribution from a teacher's, at each trained token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import nn

from treering.errors import ConfigError, InputError
from treering.model.divergence import DivergenceKind
from treering.model.forward import check_temperature
from treering.train.objective import (
    BranchValues,
    Distillation,
    Entries,
    Normalizer,
    Objective,
    Shared,
    Terms,
    Weighting,
    as_given_scores,
)
from treering.types import is_count


def distill(
    teacher: nn.Module | Sequence[Any],
    divergence: DivergenceKind = "forward_kl",
    *,
    beta: float | None = None,
    top_k: int | None = None,
    temperature: float | None = None,
    loss_masks: BranchValues | None = None,
    normalizer: Normalizer | None = None,
    shared: Shared | None = None,
    divisor: float | None = None,
    added_to: Objective | None = None,
    weight: float = 1.0,
) -> Objective:
    """Build a distillation objective for a teacher with the same vocabulary (GKD, arXiv 2306.13649).

    A divergence depends only on the tokens before it. So on a forest, teacher, student and divergence are each computed
    once per distinct token, and the weights of branches add up.

    Args:
        teacher: a model, which runs on the same forests without gradients; or its k likeliest tokens for K branches:
            one pair (ids, log-probs) [tokens, k] each, whose entry t is the distribution that token t was drawn from
            (see `TeacherTopK.of_branches`). Branches must agree where they share a state.
        divergence: forward_kl is KL(teacher, student), reverse_kl KL(student, teacher), jsd the generalised
            Jensen-Shannon divergence.
        beta: the teacher's weight in jsd's mixture, between 0 and 1; 0.5 by default.
        top_k: compare only the model's k likeliest tokens, and all others as one outcome; None compares the whole
            vocabulary.
        temperature: divides the logits of both; None uses that of `backward`. Given log-probs are not changed.
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); None trains all tokens.
        normalizer: "token_mean" by default; see `Weighting`.
        shared: "sum", the default, equals training every branch separately; "once" counts shared tokens once.
        divisor: for normalizer="constant".
        added_to: an objective with a term per token, to which `weight` times the divergence is added; its masks,
            normaliser and sharing convention apply to both.
        weight: factor of the divergence, positive.

    Raises:
        ConfigError: an unknown divergence, options that contradict each other, or `added_to` with terms of pairs.
        InputError: a teacher that is neither a model nor scores, or a temperature that is not positive.

    Example: if the student knows nothing (q = 1/2, 1/2) and the teacher is sure (p = 1, 0), the forward KL of a token
    is ln 2 = 0.693.
    """
    if divergence not in get_args(DivergenceKind):
        raise ConfigError(f"divergence must be one of {', '.join(get_args(DivergenceKind))}, got {divergence!r}")
    distillation = Distillation(
        teacher=teacher if isinstance(teacher, nn.Module) else _given(teacher, top_k),
        kind=divergence,
        beta=_checked_beta(divergence, beta),
        temperature=temperature,
        top_k=top_k,
    )
    if temperature is not None:
        check_temperature(temperature)
    if top_k is not None and not is_count(top_k, least=1):
        raise ConfigError(f"top_k must be at least 1, got {top_k!r}; None compares the whole vocabulary")
    if not (isinstance(weight, int | float) and 0 < weight < float("inf")):
        raise ConfigError(f"the weight of a divergence must be a positive number, got {weight!r}; remove distill for 0")
    if added_to is None:
        weighting = Weighting(normalizer=normalizer or "token_mean", shared=shared or "sum", divisor=divisor)
        plain = Objective(
            name="distill", weighting=weighting, terms=_nothing, loss_masks=loss_masks, reads_logprobs=False
        )
        return _added(plain, distillation, weight)
    own = {"loss_masks": loss_masks, "normalizer": normalizer, "shared": shared, "divisor": divisor}
    _check_base(added_to, [name for name, option in own.items() if option is not None])
    return _added(added_to, distillation, weight)


def _added(base: Objective, distillation: Distillation, weight: float) -> Objective:
    def terms(entries: Entries) -> Terms:
        assert entries.divergence is not None
        plain, divergence = base.terms(entries), entries.divergence
        return Terms(
            loss=plain.loss + weight * divergence, metrics={**plain.metrics, "divergence": divergence.detach()}
        )

    return replace(base, terms=terms, distillation=distillation)


def _nothing(entries: Entries) -> Terms:
    return Terms(loss=entries.logprobs.detach() * 0.0, metrics={})


def _given(teacher: object, top_k: int | None) -> Any:
    if not isinstance(teacher, Sequence):
        raise InputError(
            f"a teacher must be a model, or one pair (ids, log-probs) per branch, got {type(teacher).__name__}; see "
            "treering.score"
        )
    if top_k is not None:
        raise ConfigError(f"top_k applies to a teacher that is a model, got {top_k} with given scores; remove it")
    return as_given_scores(teacher)


def _checked_beta(divergence: str, beta: float | None) -> float:
    if beta is None:
        return 0.5
    if divergence != "jsd":
        raise ConfigError(f'beta applies only to divergence="jsd", got {beta!r} with {divergence!r}')
    if not (isinstance(beta, int | float) and 0 < beta < 1):
        raise ConfigError(
            f'beta of jsd must be between 0 and 1, got {beta!r}; the limits are divergence="forward_kl", "reverse_kl"'
        )
    return float(beta)


def _check_base(base: Objective, own: list[str]) -> None:
    if own:
        raise ConfigError(f"added_to sets {', '.join(own)} for both losses; remove them from distill")
    if base.scope == "pair":
        raise ConfigError(
            f"a divergence needs an objective with a term per token, and {base.name} has one per pair; train them "
            "separately"
        )
    if base.distillation is not None:
        raise ConfigError(f"an objective can have one teacher, and {base.name} has one already")
