"""Random traces: lengths by one of four laws, and predictions with an error of a given size.

`treering.schedule.predict.calibration` measures how predictable real logs are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.policy import Forecast
from treering.schedule.traces.trace import Trace, TraceStep

FORMS = "lognormal:MU,SIGMA[,MAX]; exponential:MEAN[,MAX]; bimodal:SHORT,LONG,SHARE[,SPREAD[,MAX]]; constant:N"
"""The text forms of length laws. exp(MU) is the median: MU 8.2 is 3,641 tokens."""

DEFAULT_SPREAD = 0.3
"""Sigma of the logarithm around either length of a bimodal law."""

_MOST_TOKENS = 2**31 - 1
"""As in a log; sums over a run then fit 64 bits."""

Sampler = Callable[[np.random.Generator, int], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthLaw:
    """A distribution of lengths.

    Example: `parse_law("lognormal:8.2,0.8,16384")` has half of its lengths below 3,641, and none above 16,384.
    """

    sample: Sampler
    """Samples a number of lengths with a generator: float64, not rounded and not clipped."""
    max_tokens: int | None
    """Longer ones are clipped to this; None clips none."""


def parse_law(text: str) -> LengthLaw:
    """Parses a length law.

    - `lognormal:MU,SIGMA[,MAX]`: exp of a normal number; exp(MU) is the median.
    - `exponential:MEAN[,MAX]`.
    - `bimodal:SHORT,LONG,SHARE[,SPREAD[,MAX]]`: a SHARE of the lengths lies around LONG, the rest around SHORT, with a
      sigma of SPREAD in the logarithm (0.3).
    - `constant:N`.

    Raises:
        InputError: another name, a wrong count of numbers, or one out of its range.

    >>> parse_law("constant:300").sample(np.random.default_rng(0), 2).tolist()
    [300.0, 300.0]
    """
    name, colon, rest = text.partition(":")
    build = _LAWS.get(name)
    if build is None or not colon:
        raise InputError(f"a law of lengths is one of {FORMS}; got {text!r}")
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError as error:
        raise InputError(f"a law has numbers with commas between them, got {text!r}; {_RANGES[name]}") from error
    law = build(numbers) if np.isfinite(numbers).all() else None
    if law is None:
        raise InputError(f"a law has its numbers, each in its range, got {text!r}; {_RANGES[name]}")
    return law


def _whole_lengths(lengths: NDArray[np.float64], law: LengthLaw) -> NDArray[np.int64]:
    """Lengths as token counts: rounded, at least 1, at most what the law allows."""
    limited = np.clip(lengths, 1.0, law.max_tokens)
    if limited.max() > _MOST_TOKENS:
        raise InputError(
            f"a rollout has at most {_MOST_TOKENS:,} tokens, and the law of lengths gave {limited.max():.3g}; lower "
            "it, or give it a MAX"
        )
    return np.rint(limited).astype(np.int64)


def _lognormal(numbers: list[float]) -> LengthLaw | None:
    if len(numbers) not in (2, 3) or numbers[1] < 0 or not _has_limit(numbers, 2):
        return None
    mu, sigma = numbers[:2]
    return LengthLaw(sample=lambda random, count: random.lognormal(mu, sigma, count), max_tokens=_limit(numbers, 2))


def _exponential(numbers: list[float]) -> LengthLaw | None:
    if len(numbers) not in (1, 2) or numbers[0] <= 0 or not _has_limit(numbers, 1):
        return None
    return LengthLaw(sample=lambda random, count: random.exponential(numbers[0], count), max_tokens=_limit(numbers, 1))


def _bimodal(numbers: list[float]) -> LengthLaw | None:
    if len(numbers) not in (3, 4, 5) or not 0 < numbers[0] <= numbers[1] or not 0 <= numbers[2] <= 1:
        return None
    short, long, share = numbers[:3]
    spread = numbers[3] if len(numbers) > 3 else DEFAULT_SPREAD
    if spread < 0 or not _has_limit(numbers, 4):
        return None

    def sample(random: np.random.Generator, count: int) -> NDArray[np.float64]:
        middles = np.where(random.random(count) < share, long, short)
        lengths: NDArray[np.float64] = middles * np.exp(spread * random.standard_normal(count))
        return lengths

    return LengthLaw(sample=sample, max_tokens=_limit(numbers, 4))


def _constant(numbers: list[float]) -> LengthLaw | None:
    if len(numbers) != 1 or not _has_limit(numbers, 0):
        return None
    return LengthLaw(sample=lambda random, count: np.full(count, numbers[0]), max_tokens=_limit(numbers, 0))


def _has_limit(numbers: list[float], at: int) -> bool:
    """Whether the number at this index, if present, is a token count."""
    return len(numbers) <= at or (numbers[at] >= 1 and numbers[at].is_integer())


def _limit(numbers: list[float], at: int) -> int | None:
    return int(numbers[at]) if len(numbers) > at else None


_LAWS = {"lognormal": _lognormal, "exponential": _exponential, "bimodal": _bimodal, "constant": _constant}
_RANGES = {
    "lognormal": "write lognormal:MU,SIGMA or lognormal:MU,SIGMA,MAX with SIGMA >= 0 and a whole MAX >= 1",
    "exponential": "write exponential:MEAN or exponential:MEAN,MAX with MEAN > 0 and a whole MAX >= 1",
    "bimodal": "write bimodal:SHORT,LONG,SHARE, then SPREAD >= 0 and a whole MAX >= 1 if you like, with "
    "0 < SHORT <= LONG and SHARE in [0, 1]",
    "constant": "write constant:N with a whole N >= 1",
}


def synthetic_trace(
    spec: str | LengthLaw, *, num_steps: int, num_rollouts: int, noise: float = 0.25, seed: int
) -> Trace:
    """Lengths sampled from a law; each prediction is the length times exp(noise z), z standard normal.

    Each rollout has a prompt of its own. Predictions are at most the law's largest length, or the longest rollout if
    the law has no limit.

    Args:
        spec: a law, or its text as `parse_law` reads it.
        num_steps: at least 1.
        num_rollouts: of each step, at least 1.
        noise: standard deviation of log(predicted / actual), at least 0.
        seed: of lengths and errors.

    Raises:
        InputError: a law that cannot be read, or a number out of its range.

    Example: `synthetic_trace("constant:100", num_steps=12, num_rollouts=64, noise=0.0, seed=0)` has 12 steps of 64
    rollouts with 100 tokens each, all predicted exactly.
    """
    law = parse_law(spec) if isinstance(spec, str) else spec
    if min(num_steps, num_rollouts) < 1:
        raise InputError(
            f"a trace has one step or more of one rollout or more, got {num_steps} steps of {num_rollouts}; raise them"
        )
    if not (np.isfinite(noise) and noise >= 0):
        raise InputError(f"noise is the sigma of log errors, at least 0, got {noise!r}; correct it")
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_steps):
        lengths = _whole_lengths(law.sample(random, num_rollouts), law)
        predicted = np.maximum(lengths * np.exp(noise * random.standard_normal(num_rollouts)), 1.0)
        pairs.append((lengths, predicted))
    return _as_trace(pairs, law)


def _as_trace(pairs: list[tuple[NDArray[np.int64], NDArray[np.float64]]], law: LengthLaw) -> Trace:
    longest = max(int(lengths.max()) for lengths, _ in pairs) if law.max_tokens is None else law.max_tokens
    steps = []
    for number, (lengths, predicted) in enumerate(pairs):
        prompts = number * lengths.size + np.arange(lengths.size)
        forecast = Forecast(lengths=np.minimum(predicted, longest), prompts=prompts)
        steps.append(TraceStep(lengths=lengths, forecast=forecast))
    return Trace(steps=tuple(steps), max_tokens=longest)
