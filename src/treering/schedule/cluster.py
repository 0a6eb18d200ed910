"""The workers that a policy plans for: their number, slots, token limit, staleness and latency."""

from dataclasses import dataclass
from typing import Literal

from treering.errors import ConfigError
from treering.schedule.latency import Latency
from treering.types import is_count

Rebalancing = Literal["none", "queued", "running"]
"""What may go to another worker once a step has begun. none: nothing, so that which rollouts run side by side depends
on no clock. queued: rollouts that have not started. running: those too that have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Equal workers, each with its own slots, and one trainer beside them.

    Example: `Cluster(num_workers=32, num_slots=128, max_tokens=16384, staleness=1, latency=latency)` runs 4,096
    rollouts at one time; those of step 3 are sampled with the weights of step 1.
    """

    num_workers: int
    """Rollout workers."""
    num_slots: int
    """Rollouts that a worker decodes at one time."""
    max_tokens: int
    """Tokens of a rollout at most."""
    staleness: int
    """Step k is sampled by the weights after step k - 1 - staleness, never by others."""
    latency: Latency
    """How long everything takes; a policy sees what it is told, which may be wrong. A run begins with this, and tells
    what it measures."""
    rebalancing: Rebalancing = "running"
    """What the workers can do of it; policies ask for no more."""

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 1), ("num_slots", 1), ("max_tokens", 1), ("staleness", 0)):
            if not is_count(getattr(self, name), least=least):
                raise ConfigError(f"{name} is a whole number from {least} on, got {getattr(self, name)!r}; correct it")

    def version_of(self, step: int) -> int:
        """Policy version that samples a step, from 1: max(0, step - 1 - staleness).

        Example: with staleness 1 steps 1, 2, 3 and 4 are sampled by the versions 0, 0, 1 and 2.
        """
        return max(0, step - 1 - self.staleness)
