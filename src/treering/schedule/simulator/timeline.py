"""The result of a simulation: when each worker ran each step, when steps ended, and derived figures.

K steps, W workers, P spans: a span is one worker's share of one step, from its first token to its last
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The timeline of one policy on one trace.

    Example: two workers that run [0, 4] and [0, 2] of one step, then train for 1, have a makespan of 5 and a bubble of
    2 / 8: of the 8 seconds until the last rollout ended, a worker is idle for 2.
    """

    policy: str
    """Its name."""
    workers: NDArray[np.int32]
    """int32 [P]: worker of each span."""
    steps: NDArray[np.int32]
    """int32 [P]: step of each span, from 1."""
    started_s: NDArray[np.float64]
    """float64 [P]."""
    ended_s: NDArray[np.float64]
    """float64 [P]."""
    num_rollouts: NDArray[np.int64]
    """int64 [P]: rollouts that ended there."""
    sampled_s: NDArray[np.float64]
    """float64 [K]: when a step's last rollout ended."""
    trained_s: NDArray[np.float64]
    """float64 [K]: when its update ended."""
    num_workers: int
    """W."""
    num_tokens: int
    """Sampled tokens of all steps."""
    bound_s: float
    """No schedule is shorter; see `treering.schedule.simulator.bounds`."""
    staleness_max: int
    """The largest number of updates between the weights that sampled a token and those that it trained."""
    num_stolen: int
    """Rollouts that started on another worker than assigned."""
    num_moved: int
    """Moves of running rollouts."""
    choices: tuple[str, ...] = ()
    """The plan used for each step, if the policy chooses among plans."""

    @property
    def makespan_s(self) -> float:
        """Time until the end of the last update."""
        return float(self.trained_s[-1])

    @property
    def bubble(self) -> float:
        """Share of all workers' time, until the last rollout ended, without decoding."""
        total = self.num_workers * float(self.sampled_s.max())
        # The sum may round to a little more than the whole.
        return max(0.0, 1.0 - float((self.ended_s - self.started_s).sum()) / total)

    @property
    def throughput_of_bound(self) -> float:
        """Lower bound over makespan: 1.0 is the best possible."""
        return self.bound_s / self.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of the whole run."""
        return self.num_tokens / self.makespan_s
