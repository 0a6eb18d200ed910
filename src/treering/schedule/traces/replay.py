"""Turns logged steps into a trace: each step is predicted from the steps that a run would have seen before it."""

import os
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from treering.data.formats.detect import FormatName
from treering.schedule.policy import Forecast
from treering.schedule.predict.lengths import LengthPredictor, make_predictor
from treering.schedule.predict.waits import WaitPredictor
from treering.schedule.traces.logs import LoggedStep, read_log
from treering.schedule.traces.trace import Trace, TraceStep
from treering.types import PromptId


def read_trace(
    path: str | os.PathLike[str],
    *,
    num_rollouts: int | None = None,
    staleness: int = 0,
    format: FormatName = "auto",
) -> Trace:
    """A log with predictions; the longest rollout is the trace's `max_tokens`.

    Args:
        path: as `treering.schedule.traces.logs.read_log` reads it.
        num_rollouts: of a step, if the log has no `step`; see `read_log`.
        staleness: step k is predicted from the steps up to k - 1 - staleness, which have ended when it is planned.
        format: of the records; see `read_log`.

    Raises:
        InputError: see `read_log`.

    Example: `read_trace("runs/a", staleness=1)` is the trace of a run's own rollouts.
    """
    steps = read_log(path, num_rollouts=num_rollouts, format=format)
    longest = max(int(step.lengths.max()) for step in steps)
    predictor = make_predictor(max_tokens=longest)
    return Trace(steps=predicted_steps(steps, predictor, staleness=staleness), max_tokens=longest)


def predicted_steps(
    steps: Sequence[LoggedStep], predictor: LengthPredictor, *, staleness: int = 0
) -> tuple[TraceStep, ...]:
    """The steps with predictions made before the predictor has seen them; afterwards it has seen all but the latest.

    Example: a prompt with lengths 100, 200 and 300 in three steps is predicted by the median at `guess`, 100 and 200,
    and with a staleness of 1 at `guess`, `guess` and 100.
    """
    numbers: dict[PromptId, int] = {}
    waits = WaitPredictor()
    predicted = []
    for at, step in enumerate(steps):
        known = at - 1 - staleness
        if known >= 0:
            _observe(steps[known], predictor, waits)
        lengths = np.concatenate(
            [predictor.predict([prompt], span.stop - span.start) for prompt, span in _groups(step)]
        )
        prompts = [numbers.setdefault(prompt, len(numbers)) for prompt in step.prompts]
        num_turns, wait_s = waits.predict(step.prompts, 1) if waits.has_waits else (None, None)
        forecast = Forecast(lengths=lengths, prompts=np.array(prompts, np.int64), num_turns=num_turns, wait_s=wait_s)
        predicted.append(
            TraceStep(
                lengths=step.lengths,
                forecast=forecast,
                num_prompt_tokens=_prefilled(step.num_prompt_tokens),
                turns=step.turns,
            )
        )
    return tuple(predicted)


def _groups(step: LoggedStep) -> list[tuple[PromptId, slice]]:
    """Each prompt of a step with the slice of its rollouts."""
    groups, start = [], 0
    for prompt, members in groupby(step.prompts):
        stop = start + sum(1 for _ in members)
        groups.append((prompt, slice(start, stop)))
        start = stop
    return groups


def _observe(step: LoggedStep, predictor: LengthPredictor, waits: WaitPredictor) -> None:
    for prompt, span in _groups(step):
        predictor.observe(prompt, step.lengths[span])
        if step.turns is not None:
            waits.observe(prompt, step.turns.of_rollouts(span))


def _prefilled(num_prompt_tokens: NDArray[np.int64]) -> NDArray[np.int64] | None:
    return num_prompt_tokens if num_prompt_tokens.any() else None
