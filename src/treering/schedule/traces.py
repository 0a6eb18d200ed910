"""Traces of steps for the simulator, from a log or sampled from a law."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from treering.data.formats.reader import FormatName
from treering.errors import InputError
from treering.schedule.policy import Forecast
from treering.schedule.predict import LengthPredictor, WaitPredictor, make_predictor
from treering.schedule.rollout_logs import LoggedStep, read_log
from treering.schedule.turns import Turns
from treering.types import PromptId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceStep:
    """Rollouts of one step.

    Example: a group of two is `TraceStep(lengths=[120, 80], forecast=Forecast(lengths=[100, 100], prompts=[0, 0]))`.
    """

    lengths: NDArray[np.int64]
    """int64 [R] >= 1: actual lengths in tokens."""
    forecast: Forecast
    """Predictions for the rollouts."""
    num_prompt_tokens: NDArray[np.int64] | None = None
    """int64 [R] >= 0: tokens to prefill; None means no prefill."""
    turns: Turns | None = None
    """Turns of the same rollouts; None if no rollout waits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.asarray(self.lengths, np.int64))
        if self.lengths.shape != self.forecast.lengths.shape or (self.lengths < 1).any():
            raise InputError(
                f"a step needs a length of at least 1 for each of its {self.forecast.num_rollouts} rollouts, got "
                f"{self.lengths.shape}; drop empty rollouts"
            )
        if self.turns is not None and not np.array_equal(self.turns.lengths, self.lengths):
            raise InputError(
                f"the turns of a rollout must sum to its length, got {self.turns.lengths.tolist()[:8]} for lengths "
                f"{self.lengths.tolist()[:8]}; correct either"
            )
        if self.num_prompt_tokens is None:
            return
        object.__setattr__(self, "num_prompt_tokens", np.asarray(self.num_prompt_tokens, np.int64))
        if self.num_prompt_tokens.shape != self.lengths.shape or (self.num_prompt_tokens < 0).any():
            raise InputError(
                f"num_prompt_tokens must be at least 0 for each of {self.lengths.size} rollouts, got shape "
                f"{self.num_prompt_tokens.shape}; give one per rollout, or None for no prefill"
            )

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.lengths.size

    @property
    def has_waits(self) -> bool:
        """Whether any rollout waits."""
        return self.turns is not None and bool(self.turns.wait_s.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Steps in order, and the length limit."""

    steps: tuple[TraceStep, ...]
    """Steps of the run, at least one."""
    max_tokens: int
    """Most tokens of a rollout."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("a trace needs at least one step, got none; give rollouts")
        longest = max(int(step.lengths.max()) for step in self.steps)
        if longest > self.max_tokens:
            raise InputError(
                f"a rollout has at most max_tokens={self.max_tokens} tokens, got one of {longest}; raise it"
            )

    @property
    def has_waits(self) -> bool:
        """Whether any rollout of any step waits."""
        return any(step.has_waits for step in self.steps)


_MOST_TOKENS = 2**31 - 1
"""Most tokens of a rollout, as in a log; sums over a run then fit into 64 bits."""


def synthetic_trace(law: str, *, num_steps: int, num_rollouts: int, noise: float = 0.25, seed: int) -> Trace:
    """Sample lengths from a lognormal law; each prediction is the length times exp(noise z), z standard normal.

    Each rollout has its own prompt. Predictions are at most the law's MAX, or the longest rollout without one.

    Args:
        law: "lognormal:MU,SIGMA" or "lognormal:MU,SIGMA,MAX"; exp(MU) is the median, and every length if SIGMA is 0.
        num_steps: at least 1.
        num_rollouts: rollouts of each step, at least 1.
        noise: standard deviation of log(predicted / actual), at least 0.
        seed: seed of lengths and errors.

    Raises:
        InputError: the law cannot be read, or a number is out of range.

    Example: `synthetic_trace("lognormal:8.2,0.8,16384", num_steps=12, num_rollouts=64, seed=0)` has 12 steps of 64
    rollouts, half of them below 3,641 tokens and none above 16,384.
    """
    mu, sigma, max_tokens = _parsed(law)
    if min(num_steps, num_rollouts) < 1:
        raise InputError(
            f"num_steps and num_rollouts must be at least 1, got {num_steps} steps of {num_rollouts}; raise them"
        )
    if not (np.isfinite(noise) and noise >= 0):
        raise InputError(f"noise, the sigma of log errors, must be at least 0, got {noise!r}; correct it")
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_steps):
        sampled = np.clip(random.lognormal(mu, sigma, num_rollouts), 1.0, max_tokens)
        if sampled.max() > _MOST_TOKENS:
            raise InputError(
                f"a rollout can have at most {_MOST_TOKENS:,} tokens, but the law of lengths gave {sampled.max():.3g}; "
                "lower it, or give it a MAX"
            )
        lengths = np.rint(sampled).astype(np.int64)
        predicted = np.maximum(lengths * np.exp(noise * random.standard_normal(num_rollouts)), 1.0)
        pairs.append((lengths, predicted))
    longest = max_tokens or max(int(lengths.max()) for lengths, _ in pairs)
    steps = []
    for number, (lengths, predicted) in enumerate(pairs):
        prompts = number * num_rollouts + np.arange(num_rollouts)
        forecast = Forecast(lengths=np.minimum(predicted, longest), prompts=prompts)
        steps.append(TraceStep(lengths=lengths, forecast=forecast))
    return Trace(steps=tuple(steps), max_tokens=longest)


def _parsed(law: str) -> tuple[float, float, int | None]:
    name, _, rest = law.partition(":")
    try:
        mu, sigma, *limit = (float(part) for part in rest.split(","))
        is_whole = all(maximum >= 1 and maximum.is_integer() for maximum in limit)
        if name == "lognormal" and np.isfinite(mu) and 0 <= sigma < np.inf and len(limit) < 2 and is_whole:
            return mu, sigma, int(limit[0]) if limit else None
    except ValueError:
        pass
    raise InputError(
        f"a law of lengths must be lognormal:MU,SIGMA or lognormal:MU,SIGMA,MAX with SIGMA >= 0 and an integer "
        f"MAX >= 1, got {law!r}; for equal lengths of N tokens write lognormal:LOG(N),0"
    )


def read_trace(
    path: str | os.PathLike[str],
    *,
    num_rollouts: int | None = None,
    staleness: int = 0,
    format: FormatName = "auto",
) -> Trace:
    """Read a log and add predictions; the longest rollout is the trace's `max_tokens`.

    Args:
        path: file or folder, see `treering.schedule.rollout_logs.read_log`.
        num_rollouts: rollouts of a step if the log has no `step`; see `read_log`.
        staleness: step k is predicted from the steps up to k - 1 - staleness, which have ended when it is scheduled.
        format: format of the records; see `read_log`.

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
    """Predict the steps, each before the predictor observes it; in the end it has observed all but the latest.

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
