"""Validates an engine's settings."""

from typing import get_args

import numpy as np

from treering.engine.batch.duplicate_rows import DuplicateRows
from treering.engine.kv_cache.rollout_cache import Continuation
from treering.engine.speculation.observed_costs import ObservedCosts
from treering.errors import ConfigError
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter


def check_settings(
    *,
    drafter: object,
    costs: object,
    max_batch: object,
    max_tokens: object,
    max_prefill: object,
    version: object,
    seed: object,
    num_threads: object,
    duplicate_rows: object,
    continuation: object,
) -> None:
    """Checks the settings of `TorchEngine` that do not depend on the model.

    Raises:
        ConfigError: a limit below 1 (2 for max_tokens), a negative version, a limit that is not a whole number, or an
            invalid drafter, `costs`, `duplicate_rows` or `continuation`.
    """
    _check_integer("max_batch", max_batch, least=1)
    _check_integer("max_tokens", max_tokens, least=2)
    _check_integer("max_prefill", max_prefill, least=1)
    _check_integer("version", version, least=0)
    _check_integer("seed", seed, least=None)
    if num_threads is not None:
        _check_integer("num_threads", num_threads, least=1)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ConfigError(f"drafter is a treering.Drafter, or None to draft nothing, got {drafter!r}; make one")
    if not isinstance(costs, VerifyCosts | ObservedCosts) and costs not in ("measured", "none"):
        raise ConfigError(f'costs are "measured", "none", a VerifyCosts or an ObservedCosts, got {costs!r}; choose one')
    check_duplicate_rows(duplicate_rows)
    if continuation not in get_args(Continuation):
        raise ConfigError(
            f"continuation is one of {', '.join(get_args(Continuation))}, got {continuation!r}; choose one"
        )


def check_duplicate_rows(duplicate_rows: object) -> None:
    """Checks the mode for duplicate rows.

    Raises:
        ConfigError: an unknown mode.
    """
    if duplicate_rows not in get_args(DuplicateRows):
        raise ConfigError(
            f"duplicate_rows is one of {', '.join(get_args(DuplicateRows))}, got {duplicate_rows!r}; choose one"
        )


def _check_integer(name: str, value: object, *, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} of an engine is a whole number, got {value!r}; correct it")
    if least is not None and value < least:
        raise ConfigError(f"{name} of an engine is at least {least}, got {value}; raise it")
