"""Baseline policies. None of them corrects predictions or looks beyond its step."""

import numpy as np

from treering.schedule.plan.plans import PlacementPlan, place
from treering.schedule.policy import Assignment, PlanRequest, Policy, Stealing


class Fifo(Policy):
    """Random shards of equal size, each in prompt order; predictions are not used.

    Example: 6 rollouts on 2 workers: 3 each, drawn anew in every step.
    """

    def __init__(self, *, stealing: Stealing = "off", seed: int = 0) -> None:
        """`stealing` "queued" is work stealing: an idle worker takes from the longest queue."""
        self._stealing = stealing
        self._seed = seed

    @property
    def name(self) -> str:
        """Name in reports."""
        return "fifo" if self._stealing == "off" else "work_stealing"

    def assign(self, request: PlanRequest) -> Assignment:
        """A shard for each worker."""
        num_rollouts = request.forecasts[0].num_rollouts
        stealing: Stealing = "off" if request.cluster.rebalancing == "none" else self._stealing
        random = np.random.default_rng((self._seed, request.step))
        shards = random.permutation(np.arange(num_rollouts) % request.cluster.num_workers)
        return Assignment(workers=shards, order=np.arange(num_rollouts), stealing=stealing)


class PlanPolicy(Policy):
    """One plan for all steps, with uncorrected forecasts.

    Example: `PlanPolicy(PlacementPlan(name="turns", num_turns=2))` runs odd and even steps on different workers.
    """

    def __init__(self, plan: PlacementPlan) -> None:
        self._plan = plan

    @property
    def name(self) -> str:
        """Name in reports."""
        return self._plan.name

    def assign(self, request: PlanRequest) -> Assignment:
        """Places the step by the plan."""
        forecast = request.forecasts[0]
        return place(
            self._plan,
            forecast.lengths,
            forecast.prompts,
            step=request.step,
            cluster=request.cluster,
            wait_s=forecast.wait_s,
        )
