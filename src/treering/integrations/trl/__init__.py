"""Treering inside TRL: rollouts from the embedded engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering.integrations.trl.rollouts import HistoryRollouts as HistoryRollouts

_HOMES = {
    "HistoryRollouts": "rollouts",
}
__all__ = [
    "HistoryRollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    from treering.extras import require

    require(f"{__name__}.{name}", "torch", "transformers", "trl", extra="trl")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
