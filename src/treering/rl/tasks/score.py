"""What a reward may return: a number, None to abstain, or a mapping of them with further numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, TypeAlias

from treering.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with the numbers that are logged beside it."""

    reward: float | None
    """Finite; None abstains: its rollout is left out of its group."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By name; the run logs their means as "rewards/NAME"."""


RewardValue: TypeAlias = float | Mapping[str, Any] | Score | None
"""What a reward may return; see `as_score`."""


def as_score(value: object) -> Score:
    """Validates what a reward returned.

    A mapping has the reward under "reward", which may be None, and numbers under other names, of which None is none.

    Raises:
        InputError: a number that is not one finite number, or a name that is no text.

    Example: `as_score({"reward": 1, "length": 7, "tools": None})` is `Score(reward=1.0, numbers={"length": 7.0})`.
    """
    if isinstance(value, Score):
        return value
    if not isinstance(value, Mapping) or "reward" not in value:
        return Score(reward=None if value is None else checked_reward(value))
    if not all(isinstance(name, str) and name for name in value):
        raise InputError(f"the numbers beside a reward have names, got {list(value)!r:.60}; use text as keys")
    numbers = {name: checked_reward(number) for name, number in value.items() if number is not None}
    return Score(reward=numbers.pop("reward", None), numbers=numbers)


def checked_reward(reward: object) -> float:
    """Validates a reward and returns it as float: a number of any type, or an array or tensor of one element.

    Raises:
        InputError: not one finite number.

    Example: 1, True, Decimal("0.5"), np.float32(0.5) and torch.tensor([0.5]) are numbers; "1", None, [1.0], NaN and
    a tensor of two are refused.
    """
    number = _item(reward)
    try:
        value = float(number) if isinstance(number, Real | Decimal) else math.nan
    except (OverflowError, ValueError):
        # An integer or a fraction that is too large, or a signalling NaN.
        value = math.nan
    if not math.isfinite(value):
        raise InputError(
            f"a reward is one finite number, an array or tensor that holds one, or None, got {reward!r:.60} "
            f"({type(reward).__name__}); return a float"
        )
    return value


def _item(reward: object) -> object:
    """The one element of an array or tensor of any library; other objects as they are."""
    item = getattr(reward, "item", None)
    if not callable(item):
        return reward
    try:
        return item()
    except (ValueError, RuntimeError, TypeError):
        return None
