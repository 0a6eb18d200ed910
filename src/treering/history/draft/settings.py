"""Settings of a drafter: shapes, sources and the ranges of numbers."""

from typing import Literal, get_args

import numpy as np

from treering.errors import ConfigError
from treering.history.draft.workspace import MAX_NODES
from treering.history.features import SOURCES, Source
from treering.types import is_count

MIN_ACCEPTANCE = 0.018
"""Default of `min_acceptance`, of a `Drafter` and of a run's configuration."""

Shape = Literal["tree", "chain"]


def check_settings(
    *,
    max_draft: int,
    min_acceptance: float,
    shape: Shape,
    sources: tuple[Source, ...],
    max_live_tokens: int,
    max_other_tokens: int,
) -> None:
    """Checks the settings of a `Drafter`; see there.

    Raises:
        ConfigError: a value out of range.
    """
    _check_integer("max_draft", max_draft, 1, MAX_NODES)
    _check_integer("max_live_tokens", max_live_tokens, 16, 1 << 24)
    _check_integer("max_other_tokens", max_other_tokens, 0, 1 << 28)
    if not _is_probability(min_acceptance):
        raise ConfigError(
            f"min_acceptance is a probability in (0, 1], got {min_acceptance!r}; {MIN_ACCEPTANCE} is usual"
        )
    if shape not in get_args(Shape):
        raise ConfigError(f"shape is one of {', '.join(get_args(Shape))}, got {shape!r}; choose one")
    if not sources or not set(sources) <= set(SOURCES):
        raise ConfigError(f"sources are some of {SOURCES}, at least one, got {sources!r}; correct them")


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float | np.number) and bool(0 < value <= 1)


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not is_count(value, least=least) or value > most:
        raise ConfigError(
            f"{name} of a drafter is a whole number from {least} to {most}, got {value!r}; correct it, or use no "
            "drafter at all"
        )
