"""Scheduling policies by name, as configurations and reports write them."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from treering.errors import ConfigError
from treering.schedule.plan.baselines import Fifo, PlanPolicy
from treering.schedule.plan.histopipe import HistoPipe
from treering.schedule.plan.plans import PlacementPlan
from treering.schedule.policy import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "fifo": Fifo,
        "work_stealing": lambda: Fifo(stealing="queued"),
        "longest_first": lambda: PlanPolicy(PlacementPlan(name="longest_first")),
        "equal_groups": lambda: PlanPolicy(PlacementPlan(name="equal_groups", placing="equal_counts")),
        "two_tier": lambda: PlanPolicy(PlacementPlan(name="two_tier", placing="two_tier")),
        "histopipe": HistoPipe,
    }
)
"""Policy factories. All of them move work, not results."""


def make_policy(name: str) -> Policy:
    """A new policy of that name.

    Raises:
        ConfigError: an unknown name.

    Example: `make_policy("histopipe").name` is "histopipe".
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1) or ["histopipe"]
        raise ConfigError(f"a schedule is one of {', '.join(POLICIES)}, got {name!r}; did you mean {near[0]!r}?")
    return POLICIES[name]()
