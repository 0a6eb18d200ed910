"""Tail batching: moves the longest rollouts of several steps into one step of their own.

This changes which rollouts a step trains, so it is for simulations only.
"""

from dataclasses import replace

import numpy as np

from treering.errors import UnsupportedError
from treering.schedule.plan.baselines import PlanPolicy
from treering.schedule.plan.plans import PlacementPlan, longest_first
from treering.schedule.policy import Forecast
from treering.schedule.traces.trace import Trace, TraceStep


class TailBatching(PlanPolicy):
    """Longest first, after the rollouts of every few steps were regrouped by predicted length.

    After RollPacker (arXiv 2509.21009), which starts more rollouts than it needs and defers the unfinished ones; here
    predictions choose these, and every step keeps its size.

    Example: with a window of 2, steps with predictions [1, 9] and [2, 8] become steps of [1, 2] and [8, 9].
    """

    def __init__(self, window: int = 4) -> None:
        """`window`: steps that share one step of long rollouts."""
        super().__init__(PlacementPlan(name="tail_batching", stealing="queued"))
        self._window = window

    def rearranged(self, trace: Trace) -> Trace:
        """The trace with every window regrouped; steps keep their sizes.

        Raises:
            UnsupportedError: rollouts wait.
        """
        if trace.has_waits:
            raise UnsupportedError("tail_batching regroups rollouts by length alone; simulate it without waiting")
        steps = [
            step
            for first in range(0, len(trace.steps), self._window)
            for step in _by_length(trace.steps[first : first + self._window])
        ]
        return replace(trace, steps=tuple(steps))


def _by_length(steps: tuple[TraceStep, ...]) -> list[TraceStep]:
    predicted = np.concatenate([step.forecast.lengths for step in steps])
    ends = np.cumsum([step.num_rollouts for step in steps])
    parts = np.split(longest_first(predicted)[::-1], ends[:-1])
    lengths = np.concatenate([step.lengths for step in steps])
    prompts = np.concatenate([step.forecast.prompts for step in steps])
    prefill = np.concatenate(
        [np.zeros_like(step.lengths) if step.num_prompt_tokens is None else step.num_prompt_tokens for step in steps]
    )
    return [
        TraceStep(
            lengths=lengths[part],
            forecast=Forecast(lengths=predicted[part], prompts=prompts[part]),
            num_prompt_tokens=prefill[part],
        )
        for part in parts
    ]
