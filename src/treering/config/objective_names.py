"""Names of the objectives: one per file in `train/objectives`, and those that users register.

Names are known without torch, which every such file imports.
"""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, TypeVar

from treering.errors import ConfigError

BUILT_IN = tuple(sorted(file.name for file in iter_modules([str(Path(__file__).parents[1] / "train" / "objectives")])))
"""Names of the objectives that come with the package."""

_NEED_MORE: Mapping[str, str] = MappingProxyType(
    {"dpo": "pairs of sequences", "ppo": "a value head", "sft": "demonstrations"}
)
"""Inputs of objectives that rollouts and their rewards do not have."""

registered: dict[str, Callable[..., Any]] = {}

Make = TypeVar("Make", bound=Callable[..., Any])


def register(make: Make) -> Make:
    """Register a policy loss under its function's name for `rl.objective`; used as a decorator.

    An RL step calls it as `make(advantages, loss_masks, old_logprobs, **options)`. The options are those of `clip`,
    `normalizer`, `divisor` and `PolicyOptions` that the run sets. `old_logprobs` is None if the policy has not changed
    since it sampled.

    Raises:
        ConfigError: a built-in objective has the name.

    Example: after `@register` before `def reinforce(advantages, loss_masks, old_logprobs=None, **options)`, a run can
    have `objective = "reinforce"`.
    """
    if make.__name__ in BUILT_IN:
        raise ConfigError(f"an objective needs a new name, and {make.__name__} is built in; rename the function")
    registered[make.__name__] = make
    return make


def check_name(name: str) -> str:
    """Return the name of an objective that can train rollouts; imports no torch.

    Raises:
        ConfigError: no objective has the name (the nearest is suggested), or it needs more than rollouts and rewards.

    Example: for "gropo" the error asks "did you mean 'grpo'?", and "ppo" needs a value head.
    """
    known = [each for each in (*BUILT_IN, *registered) if each not in _NEED_MORE]
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or known
    hint = f"it needs {_NEED_MORE[name]}" if name in _NEED_MORE else f"did you mean {near[0]!r}?"
    raise ConfigError(f"an objective of rollouts must be one of {', '.join(known)}, got {name!r}; {hint}")
