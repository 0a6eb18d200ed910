"""Traces with deliberately wrong predictions: controls for policies that use them. Lengths stay as they are."""

from dataclasses import replace
from typing import Literal, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from treering.schedule.traces.trace import Trace

Distortion: TypeAlias = Literal["reversed", "constant", "random"]
"""Reversed ranks, the same prediction for all, or randomly permuted predictions."""


def distort(trace: Trace, how: Distortion, seed: int) -> Trace:
    """The same rollouts with other predictions: each step has its own in another order, or their median for all.

    Args:
        trace: not modified.
        how: see `Distortion`.
        seed: of the order that is "random"; the others need none.

    Example: predictions [10, 30, 20] become [30, 10, 20] reversed, and [20, 20, 20] constant.
    """
    random = np.random.default_rng(seed)
    steps = []
    for step in trace.steps:
        wait_s = step.forecast.wait_s
        forecast = replace(
            step.forecast,
            lengths=_distorted(step.forecast.lengths, how, random),
            wait_s=None if wait_s is None else _distorted(wait_s, how, random),
        )
        steps.append(replace(step, forecast=forecast))
    return replace(trace, steps=tuple(steps))


def _distorted(lengths: NDArray[np.float64], how: Distortion, random: np.random.Generator) -> NDArray[np.float64]:
    if how == "reversed":
        order = np.argsort(lengths, kind="stable")
        distorted = np.empty_like(lengths)
        distorted[order] = lengths[order[::-1]]
        return distorted
    if how == "constant":
        return np.full_like(lengths, np.median(lengths))
    if how == "random":
        return random.permutation(lengths)
    assert_never(how)
