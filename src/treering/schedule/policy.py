"""Interface of a scheduling policy: forecasts in, an assignment of rollouts to workers out.

A policy does not use time and does not touch workers; the caller carries the assignment out.

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
"""Whether a worker with an empty queue takes queued rollouts of other workers in the same step."""

Moving = Literal["off", "drain", "consolidate"]
"""Whether running rollouts move to another worker of the same step. drain: a rollout longer than all predicted for its
worker moves to where it ends sooner; it also moves if its worker has little else left and can then begin its next step.
consolidate: a worker with at most the last tenth of its share moves all of it to the worker that runs the most
rollouts, and begins its next step."""


NUM_LEARNT = 4
"""Past steps that policies learn from."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Predictions for a step's rollouts before they run."""

    lengths: NDArray[np.float64]
    """float64 [R] > 0: predicted tokens."""
    prompts: NDArray[np.int64]
    """int64 [R]: prompt index of each rollout; equal indices are a group."""
    num_turns: NDArray[np.float64] | None = None
    """float64 [R] >= 1: predicted turns; None if `wait_s` is None."""
    wait_s: NDArray[np.float64] | None = None
    """float64 [R] >= 0: predicted seconds of waiting, in which a rollout holds no slot; None if no rollout waits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.asarray(self.lengths, np.float64))
        object.__setattr__(self, "prompts", np.asarray(self.prompts, np.int64))
        if self.lengths.ndim != 1 or self.lengths.shape != self.prompts.shape or self.lengths.size == 0:
            raise InputError(
                f"a forecast needs a length and a prompt for each of one or more rollouts, got {self.lengths.shape} "
                f"and {self.prompts.shape}; give flat arrays of equal length"
            )
        if not (np.isfinite(self.lengths) & (self.lengths > 0)).all():
            wrong = self.lengths[~(np.isfinite(self.lengths) & (self.lengths > 0))]
            raise InputError(
                f"a predicted length must be a positive number, got {wrong[0]} and {wrong.size - 1} more that are not; "
                "give a prompt without history its predictor's guess"
            )
        if (self.num_turns is None) != (self.wait_s is None):
            raise InputError("num_turns and wait_s must be predicted together, got one of them; give both or neither")
        for name, least in (("num_turns", 1.0), ("wait_s", 0.0)):
            self._check_wait(name, least)

    def _check_wait(self, name: str, least: float) -> None:
        if getattr(self, name) is None:
            return
        values = np.asarray(getattr(self, name), np.float64)
        object.__setattr__(self, name, values)
        if values.shape != self.lengths.shape or not (np.isfinite(values) & (values >= least)).all():
            raise InputError(
                f"{name} must be at least {least:g} for each of {self.lengths.size} rollouts, got {values[:8]}; "
                "correct the predictor"
            )

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.lengths.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssignmentRequest:
    """Everything that a policy knows when it assigns a step.

    Example: `AssignmentRequest(step=3, cluster=cluster, forecasts=(third, fourth))` requests step 3;
    step 4 is known too.
    """

    step: int
    """Index of the step, from 1."""
    cluster: Cluster
    """Workers of the run."""
    forecasts: tuple[Forecast, ...]
    """Forecasts of this step and of the known later ones; at least one."""

    def __post_init__(self) -> None:
        if self.step < 1 or not self.forecasts:
            raise InputError(
                f"steps count from 1 and need a forecast, got step {self.step} with {len(self.forecasts)} forecasts"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """The worker of each rollout, and what may move later.

    Example: `Assignment(workers=[1, 0, 1], order=[2, 0, 1])`: worker 1 starts rollout 2 and then 0, worker 0 rollout 1.
    """

    workers: NDArray[np.int32]
    """int32 [R]: worker of each rollout."""
    order: NDArray[np.int64]
    """int64 [R]: all rollouts, earliest first; every worker starts its rollouts in this order."""
    stealing: Stealing = "off"
    """Whether idle workers take queued rollouts."""
    moving: Moving = "off"
    """Whether running rollouts move."""
    predicted_lengths: NDArray[np.float64] | None = None
    """float64 [R] > 0: lengths as the policy corrects them, for stealing and moves; None: as forecast."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", np.asarray(self.workers, np.int32))
        object.__setattr__(self, "order", np.asarray(self.order, np.int64))
        rollouts = np.arange(self.workers.size)
        if self.order.shape != rollouts.shape or not np.array_equal(np.sort(self.order), rollouts):
            raise InputError(
                f"order must name each of {rollouts.size} rollouts once, got {self.order.tolist()[:8]} ..."
            )
        if self.predicted_lengths is None:
            return
        lengths = np.asarray(self.predicted_lengths, np.float64)
        if lengths.shape != rollouts.shape or not (np.isfinite(lengths) & (lengths > 0)).all():
            raise InputError(
                f"predicted_lengths needs one positive length per rollout, got shape {lengths.shape} for "
                f"{rollouts.size} rollouts; correct the policy"
            )
        object.__setattr__(self, "predicted_lengths", lengths)


class SchedulePolicy(ABC):
    """Policy that assigns the rollouts of each step to workers, and orders them. One object serves one run."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in reports and configurations."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The placement used for each step so far, if the policy chooses among placements."""
        return ()

    @abstractmethod
    def assign(self, request: AssignmentRequest) -> Assignment:
        """Assign the requested step; every rollout gets one of the cluster's workers."""

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:  # noqa: B027
        """Learn from predicted and actual lengths of a finished step, float64 and int64 [R]; the default ignores them.

        Before `assign` of step k, a run calls this for all steps up to k - 1 - staleness and for no later ones, so that
        assignments never depend on time.
        """

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, as dictionaries, lists, numbers and strings.

        It does not include the latest `NUM_LEARNT` steps passed to `learn`: the caller repeats these after loading.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore a `state`."""
