"""Assign the rollouts of each step to workers, with a scheduling policy and a length predictor.

Assignments change speed, never a rollout. They are checkpointed nevertheless, because rounding depends on which
rollouts share a batch.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from treering.schedule.calibration import PRIOR_SPREAD
from treering.schedule.cluster import Cluster, Latency
from treering.schedule.measured_latency import MeasuredTimes, merged
from treering.schedule.policy import NUM_LEARNT, Assignment, AssignmentRequest, Forecast, SchedulePolicy
from treering.schedule.predict import LengthPredictor, WaitPredictor
from treering.schedule.simulator import NUM_FORECASTS, checked
from treering.schedule.turns import Turns
from treering.types import PromptId

_QUANTILES = (np.arange(32) + 0.5) / 32
_GUESSED_RATIOS = np.exp(PRIOR_SPREAD * np.array([NormalDist().inv_cdf(share) for share in _QUANTILES]))
"""Ratios of actual to predicted lengths until some are known."""

PromptsOf: TypeAlias = Callable[[int], NDArray[np.int64]]
"""Returns the prompt numbers of a step."""

NUM_TIMED = 8
"""Recent steps whose times are used; pass times change as rollouts grow, and one step may be disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepAssignment:
    """Assignment of a step's rollouts to workers; prompts in order, then samples."""

    step: int
    assignment: Assignment
    predicted: NDArray[np.float64]
    """float64 [R], the lengths that the policy was given."""


class StepScheduler:
    """Scheduler of the steps in order, each once the lengths of the steps that it may use are known.

    Policies use the cluster's latency until enough passes are measured, then the measured one. With rebalancing "none"
    they always use the cluster's, so that no clock influences the run.

    Example: at staleness 1 `schedule(1)`, `schedule(2)`, `observe(1, ...)`, `schedule(3)`, `observe(2, ...)`,
    `schedule(4)`.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        predictor: LengthPredictor,
        cluster: Cluster,
        *,
        prompt_ids: Sequence[PromptId],
        prompts_of: PromptsOf,
        group_size: int,
        num_steps: int,
    ) -> None:
        """Set up with all prompt ids by number, and with `num_steps`, the last step to forecast."""
        self._policy = policy
        self._predictor = predictor
        self._waits = WaitPredictor()
        self._cluster = cluster
        self._prompt_ids = prompt_ids
        self._prompts_of = prompts_of
        self._group_size = group_size
        self._num_steps = num_steps
        self._assigned: dict[int, StepAssignment] = {}
        self._observed: deque[tuple[int, NDArray[np.float64], NDArray[np.int64]]] = deque(maxlen=NUM_LEARNT)
        self._timed: deque[MeasuredTimes] = deque(maxlen=NUM_TIMED)
        self._measured: Latency | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster of the next assignment, with the measured latency if there is one."""
        return replace(self._cluster, latency=self._measured or self._cluster.latency)

    @property
    def measured(self) -> Latency | None:
        """The measured latency of the next assignment; None if it uses the cluster's."""
        return self._measured

    def schedule(self, step: int) -> StepAssignment:
        """Return the assignment of a step, computed at the first call.

        Raises:
            InputError: if the policy names workers that do not exist.
        """
        if step not in self._assigned:
            last = max(step, min(self._num_steps, step + NUM_FORECASTS - 1))
            forecasts = tuple(self._forecast(later) for later in range(step, last + 1))
            assignment = self._policy.assign(AssignmentRequest(step=step, cluster=self.cluster, forecasts=forecasts))
            checked(assignment, forecasts[0].num_rollouts, self._cluster.num_workers)
            self._assigned[step] = StepAssignment(step=step, assignment=assignment, predicted=forecasts[0].lengths)
        return self._assigned[step]

    def scheduled(self, step: int) -> StepAssignment | None:
        """Return the assignment of a step, None if it is not scheduled yet."""
        return self._assigned.get(step)

    def note_times(self, times: MeasuredTimes) -> None:
        """Record the times since the previous step."""
        if self._cluster.rebalancing == "none":
            return
        self._timed.append(times)
        self._measured = merged(self._timed).latency()

    def observe(self, step: int, lengths: NDArray[np.int64], turns: Turns | None = None) -> None:
        """Record the actual lengths of a scheduled step, int64 [R] >= 1, and the turns of its episodes."""
        assigned = self._assigned.pop(step)
        self._observed.append((step, assigned.predicted, lengths))
        self._policy.learn(step, assigned.predicted, lengths)
        groups = lengths.reshape(-1, self._group_size)
        for number, group in zip(self._prompts_of(step).tolist(), groups, strict=True):
            self._predictor.observe(self._prompt_ids[number], group)
        if turns is None or self._cluster.rebalancing == "none":
            return
        for at, number in enumerate(self._prompts_of(step).tolist()):
            own = slice(at * self._group_size, (at + 1) * self._group_size)
            self._waits.observe(self._prompt_ids[number], turns.of_rollouts(own))

    def ratios(self) -> NDArray[np.float64]:
        """Return evenly spaced quantiles of actual over predicted lengths, float64 [H]; at first a wide guess.

        Example: after a step with 10 predicted and 5 to 20 actual tokens per rollout, they range from 0.5 to 2.
        """
        if not self._observed:
            return _GUESSED_RATIOS
        ratios = np.concatenate([lengths / predicted for _, predicted, lengths in self._observed])
        spaced: NDArray[np.float64] = np.quantile(ratios, _QUANTILES)
        return spaced

    def state(self) -> dict[str, Any]:
        """Return assignments of unfinished steps, recent lengths and times, and the states of policy and predictor."""
        return {
            "made_for": self._made_for(),
            "plans": [_as_state(assigned) for assigned in self._assigned.values()],
            "observed": [[step, *map(torch.from_numpy, arrays)] for step, *arrays in self._observed],
            "policy": self._policy.state(),
            "lengths": self._predictor.state(),
            "waits": self._waits.state(),
            "timed": [times.state() for times in self._timed],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`; assignments of another policy or cluster are dropped."""
        self._assigned = {}
        if list(state["made_for"]) == self._made_for():
            self._assigned = {each["step"]: _from_state(each) for each in state["plans"]}
            self._policy.load_state(state["policy"])
        self._observed.clear()
        for step, predicted, lengths in state["observed"]:
            self._observed.append((step, predicted.numpy().copy(), lengths.numpy().copy()))
            self._policy.learn(*self._observed[-1])
        self._timed.clear()
        self._measured = None
        self._waits.load_state(state["waits"])
        for timed in state["timed"]:
            self.note_times(MeasuredTimes.from_state(timed))
        self._predictor.load_state(state["lengths"])

    def _forecast(self, step: int) -> Forecast:
        numbers = self._prompts_of(step).tolist()
        prompt_ids = [self._prompt_ids[number] for number in numbers]
        lengths = self._predictor.predict(prompt_ids, self._group_size)
        num_turns, wait_s = self._waits.predict(prompt_ids, self._group_size) if self._waits.has_waits else (None, None)
        prompts = np.repeat(self._prompts_of(step), self._group_size)
        return Forecast(lengths=lengths, prompts=prompts, num_turns=num_turns, wait_s=wait_s)

    def _made_for(self) -> list[Any]:
        cluster = self._cluster
        return [self._policy.name, cluster.num_workers, cluster.num_slots, cluster.staleness, cluster.rebalancing]


def _as_state(assigned: StepAssignment) -> dict[str, Any]:
    assignment = {field.name: getattr(assigned.assignment, field.name) for field in fields(assigned.assignment)}
    return {
        "step": assigned.step,
        "predicted": torch.from_numpy(assigned.predicted.copy()),
        "assignment": {
            name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in assignment.items()
        },
    }


def _from_state(state: Mapping[str, Any]) -> StepAssignment:
    assignment: dict[str, Any] = {
        name: value.numpy().copy() if isinstance(value, torch.Tensor) else value
        for name, value in state["assignment"].items()
    }
    return StepAssignment(
        step=state["step"], assignment=Assignment(**assignment), predicted=state["predicted"].numpy().copy()
    )
