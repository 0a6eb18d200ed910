"""The objectives by name: one file per loss, named after it, and those that users register.

A loss is written for flat sequences and is evaluated on branch views of a forest. Its denominators are in
`treering.train.entries`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from treering.config.objective_names import check_name, registered


def find_objective(name: str) -> Callable[..., Any]:
    """Return the function of an objective that can train rollouts.

    Raises:
        ConfigError: see `check_name`.

    Example: `find_objective("grpo")` is `treering.objectives.grpo`.
    """
    if check_name(name) in registered:
        return registered[name]
    return getattr(import_module(f"{__name__}.{name}"), name)  # type: ignore[no-any-return]
