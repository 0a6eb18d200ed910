"""Random traces: lengths by a length law, and predictions with an error of a given size.

`treering.schedule.predict.calibration` measures how predictable real logs are.
"""

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.policy import Forecast
from treering.schedule.traces.length_laws import LengthLaw, parse_law, whole_lengths
from treering.schedule.traces.trace import Trace, TraceStep


def synthetic_trace(
    spec: str | LengthLaw, *, num_steps: int, num_rollouts: int, group_size: int = 1, noise: float = 0.25, seed: int
) -> Trace:
    """Lengths sampled from a law; each prediction is the length times exp(noise z), z standard normal.

    The simplest model for comparing schedules. Groups only say which rollouts share a prompt; for one prediction
    per prompt see `treering.schedule.traces.stability.stable_trace`.

    Args:
        spec: a law, or its text as `parse_law` reads it.
        num_steps: at least 1.
        num_rollouts: of each step, a multiple of `group_size`.
        group_size: rollouts of a prompt in a step.
        noise: standard deviation of log(predicted / actual), at least 0.
        seed: of lengths and errors.

    Raises:
        InputError: a law that cannot be read, or a count that does not fit.

    Example: `synthetic_trace("constant:100", num_steps=12, num_rollouts=64, noise=0.0, seed=0)` has 12 steps of 64
    rollouts with 100 tokens each, all predicted exactly.
    """
    law = parse_law(spec) if isinstance(spec, str) else spec
    check_counts(num_steps, num_rollouts, group_size)
    if not (np.isfinite(noise) and noise >= 0):
        raise InputError(f"noise is the sigma of log errors, at least 0, got {noise!r}; correct it")
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_steps):
        lengths = whole_lengths(law.sample(random, num_rollouts), law)
        predicted = np.maximum(lengths * np.exp(noise * random.standard_normal(num_rollouts)), 1.0)
        pairs.append((lengths, predicted))
    return as_trace(pairs, law, group_size)


def check_counts(num_steps: int, num_rollouts: int, group_size: int) -> None:
    """Rejects a trace without steps, and steps that are not a multiple of the group size."""
    if min(num_steps, num_rollouts, group_size) < 1 or num_rollouts % group_size:
        raise InputError(
            f"a trace has one step or more, each of whole groups, got {num_steps} steps of {num_rollouts} rollouts in "
            f"groups of {group_size}; make the rollouts a multiple of the group"
        )


def as_trace(pairs: list[tuple[NDArray[np.int64], NDArray[np.float64]]], law: LengthLaw, group_size: int) -> Trace:
    """A trace of each step's lengths and predictions; each `group_size` consecutive rollouts share a prompt.

    Predictions are capped at the law's largest length, or at the longest rollout if the law has no limit.
    """
    longest = max(int(lengths.max()) for lengths, _ in pairs) if law.max_tokens is None else law.max_tokens
    steps = []
    for number, (lengths, predicted) in enumerate(pairs):
        prompts = (number * lengths.size + np.arange(lengths.size)) // group_size
        forecast = Forecast(lengths=np.minimum(predicted, longest), prompts=prompts)
        steps.append(TraceStep(lengths=lengths, forecast=forecast))
    return Trace(steps=tuple(steps), max_tokens=longest)
