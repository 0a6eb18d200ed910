"""Treering on Ray: the processes of a run as actors, and its weights in Ray's object store.

    from treering.integrations.ray import RayLauncher

    PipelineLoop(..., launcher=RayLauncher(num_rollout_workers=2))

is `runtime.launcher = "ray"` of `treering train`. Needs the extra `ray`.
"""

from treering.integrations.ray.launcher import RayLauncher

__all__ = ["RayLauncher"]
