"""Options that all policy objectives share: importance sampling, a KL penalty, an entropy bonus.

The formulas are in `importance` and `regularizers`.
"""

import difflib
from collections.abc import Mapping
from typing import Any, TypedDict

from treering.errors import ConfigError
from treering.train.branch_values import BranchValues
from treering.train.objectives.importance import Importance, ImportanceMode
from treering.train.objectives.regularizers import KlEstimator, Regularizers

_SIMILARITY = 0.5


class PolicyOptions(TypedDict, total=False):
    """Keyword arguments of every policy objective; omitted or None, they change nothing.

    Importance weights correct for an engine whose top-p, top-k or rounding sampled from another distribution than the
    trainer's: each term is multiplied by exp(logp_old - behaviour_logp), bounded and detached. logp_old is
    `old_logprobs`, the trainer's own log-prob of the policy that sampled, or the current log-prob where these are None.
    The KL penalty and the entropy bonus are added to the term of every trained token, with the normaliser's weights but
    without importance weights.

    Example: `grpo(advantages, masks, old, ref_logprobs=ref, kl_coefficient=0.04)` is GRPO with equation 4 of its paper.
    """

    behaviour_logprobs: BranchValues | None
    """K lists with one log-probability per token, of the distribution that was sampled; needs `max_importance`."""
    max_importance: float | None
    """Cap of an importance weight, or upper bound of the mask; positive."""
    min_importance: float | None
    """Lower bound of the mask; default 0. Only for the two mask modes."""
    importance: ImportanceMode | None
    """Default "token_truncate"; see `ImportanceMode`. The two sequence modes are refused with shared="once"."""
    ref_logprobs: BranchValues | None
    """K lists with one log-probability per token, of a reference model; needs `kl_coefficient`."""
    kl_coefficient: float | None
    """Factor of the KL penalty, at least 0."""
    kl_estimator: KlEstimator | None
    """Default "k3"; see `KlEstimator`."""
    entropy_coefficient: float | None
    """Factor of the entropy bonus, at least 0; 0 measures the entropy only."""


def check_names(objective: str, options: Mapping[str, Any], *, own: tuple[str, ...]) -> None:
    """Refuses options that no policy objective has.

    Args:
        objective: name of the objective.
        options: keyword arguments.
        own: arguments of the objective itself, candidates for a suggestion.

    Raises:
        ConfigError: suggests the nearest valid name.

    Example: for grpo with `kl_coeficient` the error asks "did you mean 'kl_coefficient'?".
    """
    for name in options:
        if name in PolicyOptions.__annotations__:
            continue
        known = [*own, *PolicyOptions.__annotations__]
        near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
        hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(known)}"
        raise ConfigError(f"{objective} has no option {name!r}; {hint}")


def importance_of(options: PolicyOptions) -> Importance | None:
    """How terms are weighted; None if no option of it is given.

    Raises:
        ConfigError: an option without the others that it needs, or an invalid bound.
    """
    lower, cap, mode = options.get("min_importance"), options.get("max_importance"), options.get("importance")
    missing = [name for name in ("behaviour_logprobs", "max_importance") if options.get(name) is None]
    if len(missing) == 2 and lower is None and mode is None:
        return None
    if missing:
        raise ConfigError(
            f"importance sampling needs behaviour_logprobs and max_importance, got no {' and no '.join(missing)}; "
            "give both, or none of behaviour_logprobs, max_importance, min_importance, importance"
        )
    assert cap is not None
    return Importance(
        max_importance=cap,
        min_importance=0.0 if lower is None else lower,
        mode="token_truncate" if mode is None else mode,
    )


def regularizers_of(options: PolicyOptions) -> Regularizers:
    """The penalty and the bonus.

    Raises:
        ConfigError: an option of the KL penalty without the others that it needs, or an invalid coefficient.
    """
    estimator = options.get("kl_estimator")
    missing = [name for name in ("ref_logprobs", "kl_coefficient") if options.get(name) is None]
    if missing and (len(missing) < 2 or estimator is not None):
        raise ConfigError(
            f"a KL penalty needs ref_logprobs and kl_coefficient, got no {' and no '.join(missing)}; give both, or "
            "none of ref_logprobs, kl_coefficient, kl_estimator"
        )
    return Regularizers(
        kl_coefficient=options.get("kl_coefficient"),
        kl_estimator="k3" if estimator is None else estimator,
        entropy_coefficient=options.get("entropy_coefficient"),
    )
