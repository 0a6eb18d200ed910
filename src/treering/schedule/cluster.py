"""The workers that a policy plans for: their number, slots, token limit, staleness and latency."""

from dataclasses import dataclass, replace
from typing import Literal

from treering.errors import ConfigError
from treering.schedule.latency import Latency
from treering.types import is_count

Rebalancing = Literal["none", "queued", "running"]
"""What may move to another worker after a step has begun. none: nothing, so batches do not depend on a clock. queued:
rollouts that have not started. running: those and running rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Identical workers, each with its own slots, and one trainer.

    Example: `Cluster(num_workers=32, num_slots=128, max_tokens=16384, staleness=1, latency=latency)` runs 4,096
    rollouts at a time; step 3 is sampled with the weights of step 1.
    """

    num_workers: int
    """Rollout workers."""
    num_slots: int
    """Rollouts that a worker decodes at a time."""
    max_tokens: int
    """Maximum tokens of a rollout."""
    staleness: int
    """Step k is sampled with the weights after step k - 1 - staleness, never with others."""
    latency: Latency
    """Times that the policy plans with; they may be wrong. A run starts with these and then uses measured ones."""
    rebalancing: Rebalancing = "running"
    """What the workers support; policies request no more."""

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 1), ("num_slots", 1), ("max_tokens", 1), ("staleness", 0)):
            if not is_count(getattr(self, name), least=least):
                raise ConfigError(f"{name} is a whole number from {least} on, got {getattr(self, name)!r}; correct it")

    def version_of(self, step: int) -> int:
        """Policy version that samples a step, from 1: max(0, step - 1 - staleness).

        Example: with staleness 1 steps 1, 2, 3 and 4 are sampled by the versions 0, 0, 1 and 2.
        """
        return max(0, step - 1 - self.staleness)


def without_moves(cluster: Cluster) -> Cluster:
    """The cluster with running rollouts that stay where they are."""
    return replace(cluster, rebalancing="queued") if cluster.rebalancing == "running" else cluster
