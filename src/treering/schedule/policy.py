"""The interface of a scheduling policy: forecasts in, an assignment of rollouts to workers out.

A policy reads no clock and touches no worker; the caller carries the assignment out.

    R rollouts of a step, prompts in order, then samples
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.cluster import Cluster

Stealing = Literal["off", "queued"]
"""Whether a worker whose queue is empty takes rollouts that have not started from other queues of the same step."""

Moving = Literal["off", "faster", "drain", "consolidate"]
"""Whether running rollouts move to another worker of the same step. faster: one that outgrows what its worker's share
was predicted to reach goes where it ends sooner. freeing: also where its worker has little else left, and can begin its
next step. gathering: a worker with no more than the last tenth of its share gives all of it to the one that has the
most left, and begins its next step."""


NUM_LEARNT = 4
"""Steps that policies look back on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """What is known of a step's rollouts before they run."""

    lengths: NDArray[np.float64]
    """float64 [R] > 0: predicted tokens."""
    prompts: NDArray[np.int64]
    """int64 [R]: number of each rollout's prompt; equal ones are a group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.asarray(self.lengths, np.float64))
        object.__setattr__(self, "prompts", np.asarray(self.prompts, np.int64))
        if self.lengths.ndim != 1 or self.lengths.shape != self.prompts.shape or self.lengths.size == 0:
            raise InputError(
                f"a forecast has a length and a prompt for each of one or more rollouts, got {self.lengths.shape} and "
                f"{self.prompts.shape}; give flat arrays alike"
            )
        if not (np.isfinite(self.lengths) & (self.lengths > 0)).all():
            wrong = self.lengths[~(np.isfinite(self.lengths) & (self.lengths > 0))]
            raise InputError(
                f"a predicted length is a positive number, got {wrong[0]} and {wrong.size - 1} more that are not; give "
                "a prompt without history its predictor's guess"
            )

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.lengths.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """What a policy knows when it is asked for a step.

    Example: `PlanRequest(step=3, cluster=cluster, forecasts=(third, fourth))` asks for the third;
    the fourth is known too.
    """

    step: int
    """From 1."""
    cluster: Cluster
    """Where it runs."""
    forecasts: tuple[Forecast, ...]
    """Of this step, and of those after it as far as they are known; at least one."""

    def __post_init__(self) -> None:
        if self.step < 1 or not self.forecasts:
            raise InputError(
                f"steps count from 1 and have a forecast, got step {self.step}, {len(self.forecasts)} of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Who runs what, and what may move later.

    Example: `Assignment(workers=[1, 0, 1], order=[2, 0, 1])`: worker 1 starts rollout 2 and then 0, worker 0 rollout 1.
    """

    workers: NDArray[np.int32]
    """int32 [R]: worker of each rollout."""
    order: NDArray[np.int64]
    """int64 [R]: all rollouts, earliest first; every worker starts its own in this order."""
    stealing: Stealing = "off"
    """See `Stealing`."""
    moving: Moving = "off"
    """See `Moving`."""
    beliefs: NDArray[np.float64] | None = None
    """float64 [R] > 0: lengths as the policy believes them, by which queues and moves are judged; None: as forecast."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", np.asarray(self.workers, np.int32))
        object.__setattr__(self, "order", np.asarray(self.order, np.int64))
        rollouts = np.arange(self.workers.size)
        if self.order.shape != rollouts.shape or not np.array_equal(np.sort(self.order), rollouts):
            raise InputError(f"an order names each of {rollouts.size} rollouts once, got {self.order.tolist()[:8]} ...")
        if self.beliefs is None:
            return
        object.__setattr__(self, "beliefs", np.asarray(self.beliefs, np.float64))
        if self.beliefs.shape != rollouts.shape or not (np.isfinite(self.beliefs) & (self.beliefs > 0)).all():
            raise InputError(
                f"beliefs are one positive length a rollout, got {self.beliefs.shape} for {rollouts.size} rollouts"
            )


class Policy(ABC):
    """Decides where the rollouts of each step run, and in which order. One object plans one run, step by step."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As reports and configurations call it."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The plan that was taken for each step so far, where a policy chooses among plans."""
        return ()

    @abstractmethod
    def assign(self, outlook: PlanRequest) -> Assignment:
        """The assignment of the outlook's step; every rollout has one of the cluster's workers."""

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:  # noqa: B027
        """Told what a step's rollouts were, float64 and int64 [R], once all are there; most policies learn nothing.

        A run asks for step k after it has told all steps up to k - 1 - staleness, and no later ones, so what a policy
        knows never depends on the clock.
        """

    def state(self) -> dict[str, Any]:
        """What it needs to go on in another process, as dictionaries, lists, numbers and strings.

        What `learn` was told of the latest `NUM_LEARNT` steps is no part: whoever loads a state tells these again.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on from a `state`."""
