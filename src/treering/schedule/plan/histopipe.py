"""HistoPipe: places rollouts by predicted length, so that one step fills the gaps of the next.

It reads no clock: the same requests and lengths give the same plans.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError
from treering.schedule.latency import Shape, is_among, shape_of
from treering.schedule.plan.plans import PlacementPlan, place
from treering.schedule.plan.search import rescaled, search, search_problem
from treering.schedule.policy import Assignment, PlanRequest, Policy
from treering.schedule.predict.calibrated_lengths import PRIOR_SIGMA, CalibratedLengths


class HistoPipe(Policy):
    """Searches a family of plans for the least simulated makespan of the next steps.

    The paper's alternating equal groups (RhymeRL, arXiv 2508.18588, section 6.2) are one of them; others are
    longest first, turns of disjoint workers, and workers that run only the longest rollouts. Which one wins depends
    on whether total work or the longest rollout dominates. Predictions are corrected by the errors of earlier ones.

    Example:
        >>> policy = HistoPipe()
        >>> assignment = policy.assign(request)                                                     # doctest: +SKIP
        >>> policy.choices                                                                          # doctest: +SKIP
        ('longest first, 2 turns',)
    """

    def __init__(self, *, sigma: float = PRIOR_SIGMA, replan_every: int = 4, seed: int = 0) -> None:
        """One policy object serves one run.

        Args:
            sigma: spread of log(length / prediction) until the first step has ended.
            replan_every: steps until the next search; doubled after each search that keeps the plan.
                A search also runs at the first step after a finished one, and when the latency lies outside the range
                that the present plan was found for.
            seed: of the sampled lengths.

        Raises:
            ConfigError: a spread below 0, or steps below 1.
        """
        if not sigma >= 0 or replan_every < 1:
            raise ConfigError(
                f"a spread is at least 0, and plans are made every one or more steps, got sigma={sigma} and "
                f"replan_every={replan_every}; correct them"
            )
        self._calibrated = CalibratedLengths(sigma)
        self._replan_every = self._interval = replan_every
        self._seed = seed
        self._plan: PlacementPlan | None = None
        self._found: PlacementPlan | None = None
        self._num_workers = 0
        self._planned_for = 0
        self._has_learnt = False
        self._shapes: list[Shape] = []
        """Shapes of the latencies that the present plan was found for."""
        self._choices: list[str] = []

    @property
    def name(self) -> str:
        """Name in configurations."""
        return "histopipe"

    @property
    def choices(self) -> tuple[str, ...]:
        """The plan used for each step so far."""
        return tuple(self._choices)

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Updates the correction of predictions by a finished step."""
        self._calibrated.learn(predicted, lengths)

    def assign(self, request: PlanRequest) -> Assignment:
        """Places the step by the present plan, after a search for a better one if that is due."""
        plan = self._planned(request)
        self._choices.append(plan.name)
        forecast, cluster = request.forecasts[0], request.cluster
        lengths = self._calibrated.lengths(forecast.lengths, cluster.max_tokens)
        return place(plan, lengths, forecast.prompts, step=request.step, cluster=cluster, wait_s=forecast.wait_s)

    def _planned(self, request: PlanRequest) -> PlacementPlan:
        is_due = request.step >= self._planned_for + self._interval
        is_first_learnt = self._calibrated.has_seen and not self._has_learnt
        shape = shape_of(request.cluster.latency, request.cluster.num_slots)
        is_other = not is_among(shape, self._shapes)
        if self._plan is None or is_due or is_first_learnt or is_other:
            problem = search_problem(request, self._calibrated, seed=self._seed)
            num_workers = problem.cluster.num_workers
            # A plan found for a sample of another size does not apply to this one.
            before = self._found if num_workers == self._num_workers else None
            self._found = search(problem, before)
            is_same = self._found == before
            if not is_same:
                self._interval = self._replan_every
            elif is_due:
                self._interval *= 2
            self._num_workers = num_workers
            self._plan = rescaled(self._found, request.cluster.num_workers, num_workers)
            self._planned_for = request.step
            self._shapes = [*self._shapes, shape] if is_same else [shape]
            self._has_learnt = self._calibrated.has_seen
        return self._plan

    def state(self) -> dict[str, Any]:
        """The present plan, and when it was made."""
        plans = {"plan": self._plan, "found": self._found}
        known = {name: asdict(plan) for name, plan in plans.items() if plan is not None}
        numbers = {
            "planned_for": self._planned_for,
            "interval": self._interval,
            "num_workers": self._num_workers,
            "shapes": [list(shape) for shape in self._shapes],
        }
        return {**known, **numbers, "has_learnt": self._has_learnt}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the plan of a `state`."""
        self._plan, self._found = (
            PlacementPlan(**state[name]) if name in state else None for name in ("plan", "found")
        )
        self._planned_for, self._interval = state["planned_for"], state["interval"]
        self._num_workers, self._has_learnt = state["num_workers"], state["has_learnt"]
        self._shapes = [(shape[0], shape[1]) for shape in state.get("shapes", [])]
