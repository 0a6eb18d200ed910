"""Plans which worker runs each rollout, with a scheduling policy and a length predictor.

Plans change speed, never a rollout. They are checkpointed all the same: rounding depends on which rollouts share a
batch.
"""

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.cluster import Cluster
from treering.schedule.latency import Latency
from treering.schedule.measured_latency import PassTimes, merged
from treering.schedule.policy import NUM_LEARNT, Assignment, Forecast, PlanRequest, Policy
from treering.schedule.predict.calibrated_lengths import PRIOR_SPREAD
from treering.schedule.predict.lengths import LengthPredictor
from treering.schedule.simulator.run import NUM_FORECASTS, checked
from treering.types import PromptId

_QUANTILES = (np.arange(32) + 0.5) / 32
_GUESSED_RATIOS = np.exp(PRIOR_SPREAD * np.array([NormalDist().inv_cdf(share) for share in _QUANTILES]))
"""Of lengths of which nothing is known."""

PromptsOf: TypeAlias = Callable[[int], NDArray[np.int64]]
"""Gives the numbers of a step's prompts."""

NUM_TIMED = 8
"""Steps whose times plans are made with: what passes take changes as rollouts grow, and one step may be disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Where one step's rollouts run, prompts in order, then samples."""

    step: int
    assignment: Assignment
    predicted: NDArray[np.float64]
    """float64 [R]: lengths, as the policy was told."""


class Planner:
    """Plans steps one after another, each once the steps that it may know of are told.

    Policies are told the cluster's latency until enough is measured, and what was measured of late from then on; never
    where nothing may run elsewhere than planned (`rebalancing`), because no clock decides anything there.

    Example: at staleness 1 `plan(1)`, `plan(2)`, `tell(1, ...)`, `plan(3)`, `tell(2, ...)`, `plan(4)`.
    """

    def __init__(
        self,
        policy: Policy,
        predictor: LengthPredictor,
        cluster: Cluster,
        *,
        prompt_ids: Sequence[PromptId],
        prompts_of: PromptsOf,
        group_size: int,
        num_steps: int,
    ) -> None:
        """`prompt_ids`: of all prompts, by number; `num_steps`: of the run, beyond which nothing is foreseen."""
        self._policy = policy
        self._predictor = predictor
        self._cluster = cluster
        self._prompt_ids = prompt_ids
        self._prompts_of = prompts_of
        self._group_size = group_size
        self._num_steps = num_steps
        self._plans: dict[int, Plan] = {}
        self._told: deque[tuple[int, NDArray[np.float64], NDArray[np.int64]]] = deque(maxlen=NUM_LEARNT)
        self._timed: deque[PassTimes] = deque(maxlen=NUM_TIMED)
        self._measured: Latency | None = None

    @property
    def cluster(self) -> Cluster:
        """What the next plan is made for: with measured times, as soon as there are some."""
        return replace(self._cluster, latency=self._measured or self._cluster.latency)

    @property
    def measured(self) -> Latency | None:
        """The latency that the next plan is made with, if it was measured; None is the cluster's."""
        return self._measured

    def plan(self, step: int) -> Plan:
        """The plan of a step, made when it is first asked for.

        Raises:
            InputError: the policy names workers that are not there.
        """
        if step not in self._plans:
            last = max(step, min(self._num_steps, step + NUM_FORECASTS - 1))
            forecasts = tuple(self._forecast(later) for later in range(step, last + 1))
            assignment = self._policy.assign(PlanRequest(step=step, cluster=self.cluster, forecasts=forecasts))
            checked(assignment, forecasts[0].num_rollouts, self._cluster.num_workers)
            self._plans[step] = Plan(step=step, assignment=assignment, predicted=forecasts[0].lengths)
        return self._plans[step]

    def note_times(self, times: PassTimes) -> None:
        """Takes what was timed since the step before."""
        if self._cluster.rebalancing == "none":
            return
        self._timed.append(times)
        self._measured = merged(self._timed).latency()

    def tell(self, step: int, lengths: NDArray[np.int64]) -> None:
        """Takes what the rollouts of a planned step came to be: int64 [R] >= 1."""
        plan = self._plans.pop(step)
        self._told.append((step, plan.predicted, lengths))
        self._policy.learn(step, plan.predicted, lengths)
        groups = lengths.reshape(-1, self._group_size)
        for number, group in zip(self._prompts_of(step).tolist(), groups, strict=True):
            self._predictor.observe(self._prompt_ids[number], group)

    def ratios(self) -> NDArray[np.float64]:
        """float64 [H]: real over predicted lengths of the latest steps, evenly spaced; a wide guess before the first.

        Example: after a step that was predicted 10 tokens a rollout and had 5 to 20, they go from 0.5 to 2.
        """
        if not self._told:
            return _GUESSED_RATIOS
        ratios = np.concatenate([lengths / predicted for _, predicted, lengths in self._told])
        spaced: NDArray[np.float64] = np.quantile(ratios, _QUANTILES)
        return spaced

    def state(self) -> dict[str, Any]:
        """Plans that are made and not told, what the policy was told and what was timed of late, and lengths."""
        return {
            "made_for": self._made_for(),
            "plans": [_as_state(plan) for plan in self._plans.values()],
            "told": [[step, *map(torch.from_numpy, arrays)] for step, *arrays in self._told],
            "policy": self._policy.state(),
            "lengths": self._predictor.state(),
            "timed": [times.state() for times in self._timed],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`; plans for another policy or cluster are made anew, and lengths learnt anew."""
        self._plans = {}
        if list(state["made_for"]) == self._made_for():
            self._plans = {plan["step"]: _from_state(plan) for plan in state["plans"]}
            self._policy.load_state(state["policy"])
        self._told.clear()
        for step, predicted, lengths in state["told"]:
            self._told.append((step, predicted.numpy().copy(), lengths.numpy().copy()))
            self._policy.learn(*self._told[-1])
        self._timed.clear()
        self._measured = None
        for timed in state.get("timed", []):
            self.note_times(PassTimes.from_state(timed))
        try:
            self._predictor.load_state(state["lengths"])
        except InputError as error:
            warnings.warn(f"lengths are learnt anew, because those of the checkpoint differ: {error}", stacklevel=2)

    def _forecast(self, step: int) -> Forecast:
        numbers = self._prompts_of(step).tolist()
        lengths = self._predictor.predict([self._prompt_ids[number] for number in numbers], self._group_size)
        return Forecast(lengths=lengths, prompts=np.repeat(self._prompts_of(step), self._group_size))

    def _made_for(self) -> list[Any]:
        cluster = self._cluster
        return [self._policy.name, cluster.num_workers, cluster.num_slots, cluster.staleness, cluster.rebalancing]


def _as_state(plan: Plan) -> dict[str, Any]:
    assignment = {field.name: getattr(plan.assignment, field.name) for field in fields(plan.assignment)}
    return {
        "step": plan.step,
        "predicted": torch.from_numpy(plan.predicted.copy()),
        "assignment": {
            name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in assignment.items()
        },
    }


def _from_state(state: Mapping[str, Any]) -> Plan:
    assignment: dict[str, Any] = {
        name: value.numpy().copy() if isinstance(value, torch.Tensor) else value
        for name, value in state["assignment"].items()
    }
    return Plan(step=state["step"], assignment=Assignment(**assignment), predicted=state["predicted"].numpy().copy())
