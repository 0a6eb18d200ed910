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
from treering.schedule.plan.plans import Plan, place
from treering.schedule.plan.search import ask, rescaled, search
from treering.schedule.policy import Assignment, PlanRequest, Policy
from treering.schedule.predict.calibrated_lengths import PRIOR_SIGMA, CalibratedLengths


class HistoPipe(Policy):
    """Plans by simulating: the family of plans is searched for the least predicted makespan of the next steps.

    The paper's alternating equal groups (RhymeRL, arXiv 2508.18588, section 6.2) are one member of the family; longest
    first, turns of disjoint workers, and workers that only run the longest rollouts are others, and which one wins
    depends on whether work or the longest rollout rules. Predictions are corrected by how earlier ones came out.

    Example:
        >>> policy = HistoPipe()
        >>> assignment = policy.assign(outlook)                                                     # doctest: +SKIP
        >>> policy.choices                                                                          # doctest: +SKIP
        ('longest first, 2 turns',)
    """

    def __init__(self, *, sigma: float = PRIOR_SIGMA, replan_every: int = 4, seed: int = 0) -> None:
        """One planner for one run.

        Args:
            sigma: spread of log(length / prediction) until the first step has ended.
            replan_every: steps until the next search, twice as many after each search that leaves the plan as it is.
                The first step that knows how one came out is planned anew, too, and one whose latency is neither like
                one that the present plan was found for nor between such.
            seed: of the lengths that could come true.

        Raises:
            ConfigError: a spread below 0, or steps below 1.
        """
        if not sigma >= 0 or replan_every < 1:
            raise ConfigError(
                f"a spread is at least 0, and plans are made every one or more steps, got sigma={sigma} and "
                f"replan_every={replan_every}; correct them"
            )
        self._beliefs = CalibratedLengths(sigma)
        self._replan_every = self._interval = replan_every
        self._seed = seed
        self._plan: Plan | None = None
        self._found: Plan | None = None
        self._num_workers = 0
        self._planned_for = 0
        self._has_learnt = False
        self._shapes: list[Shape] = []
        """Of the latencies that the present plan was found for."""
        self._choices: list[str] = []

    @property
    def name(self) -> str:
        """As configurations call it."""
        return "histopipe"

    @property
    def choices(self) -> tuple[str, ...]:
        """The plan that was taken for each step so far."""
        return tuple(self._choices)

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Corrects beliefs by how a step's predictions came out."""
        self._beliefs.learn(predicted, lengths)

    def assign(self, outlook: PlanRequest) -> Assignment:
        """The step's share of the present plan, after a search for a better one where that is due."""
        plan = self._planned(outlook)
        self._choices.append(plan.name)
        forecast, cluster = outlook.forecasts[0], outlook.cluster
        lengths = self._beliefs.lengths(forecast.lengths, cluster.max_tokens)
        return place(plan, lengths, forecast.prompts, step=outlook.step, cluster=cluster)

    def _planned(self, outlook: PlanRequest) -> Plan:
        is_due = outlook.step >= self._planned_for + self._interval
        has_news = self._beliefs.has_seen and not self._has_learnt
        shape = shape_of(outlook.cluster.latency, outlook.cluster.num_slots)
        is_other = not is_among(shape, self._shapes)
        if self._plan is None or is_due or has_news or is_other:
            question = ask(outlook, self._beliefs, seed=self._seed)
            num_workers = question.cluster.num_workers
            # A plan for a sample of another size, after a step with more or fewer rollouts, is none for this one.
            before = self._found if num_workers == self._num_workers else None
            self._found = search(question, before)
            is_same = self._found == before
            if not is_same:
                self._interval = self._replan_every
            elif is_due:
                self._interval *= 2
            self._num_workers = num_workers
            self._plan = rescaled(self._found, outlook.cluster.num_workers, num_workers)
            self._planned_for = outlook.step
            self._shapes = [*self._shapes, shape] if is_same else [shape]
            self._has_learnt = self._beliefs.has_seen
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
        """Goes on with the plan of a `state`."""
        self._plan, self._found = (Plan(**state[name]) if name in state else None for name in ("plan", "found"))
        self._planned_for, self._interval = state["planned_for"], state["interval"]
        self._num_workers, self._has_learnt = state["num_workers"], state["has_learnt"]
        self._shapes = [(shape[0], shape[1]) for shape in state.get("shapes", [])]
