"""Treering on Ray: the processes of a run as actors, and its weights in Ray's object store.

    from treering.integrations.ray import RayLauncher

    PipelineLoop(..., launcher=RayLauncher(num_rollout_workers=2))

is `runtime.launcher = "ray"` of `treering train`. Needs the extra `ray`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering.integrations.ray.launcher import RayLauncher as RayLauncher

__all__ = ["RayLauncher"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.launcher"), name)
