"""Scheduling: predicted rollout lengths, policies that place rollouts on workers, and a simulator to compare them.

Public names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering.schedule.cluster import Cluster as Cluster
    from treering.schedule.cluster import Latency as Latency
    from treering.schedule.cluster import linear_latency as linear_latency
    from treering.schedule.histopipe import HistoPipe as HistoPipe
    from treering.schedule.histopipe import make_policy as make_policy
    from treering.schedule.policy import AssignmentRequest as AssignmentRequest
    from treering.schedule.policy import Forecast as Forecast
    from treering.schedule.simulator import Timeline as Timeline
    from treering.schedule.simulator import simulate as simulate
    from treering.schedule.traces import Trace as Trace
    from treering.schedule.traces import TraceStep as TraceStep
    from treering.schedule.traces import read_trace as read_trace
    from treering.schedule.traces import synthetic_trace as synthetic_trace

_HOMES = {
    "Cluster": "cluster",
    "Forecast": "policy",
    "HistoPipe": "histopipe",
    "Latency": "cluster",
    "AssignmentRequest": "policy",
    "Timeline": "simulator",
    "Trace": "traces",
    "TraceStep": "traces",
    "linear_latency": "cluster",
    "make_policy": "histopipe",
    "read_trace": "traces",
    "simulate": "simulator",
    "synthetic_trace": "traces",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'treering.schedule' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = getattr(import_module(f"treering.schedule.{_HOMES[name]}"), name)
    # Stored, so that later look-ups are free and return the same object.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
