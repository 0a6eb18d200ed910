"""Latency of a worker: decode steps by batch size, prefill, speculation, loading weights, training.

Times are in the user's unit, seconds by convention.

    B rows that a worker decodes at one time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latency:
    """Times of a worker and of the trainer.

    Example: steps of 20 s plus 0.05 s a row are `Latency(num_rows=[0, 1], decode_s=[20.0, 20.05])`: 64 rows
    take 23.2 s a step, and with 2 tokens a row and step, 11.6 s a token.
    """

    num_rows: NDArray[np.int64]
    """int64 [K], ascending: batch sizes that decode steps were measured with."""
    decode_s: NDArray[np.float64]
    """float64 [K] > 0, not falling: step time at each size; linear in between, extrapolated with the last slope."""
    tokens_per_step: NDArray[np.float64] | None = None
    """float64 [K] >= 1: tokens that a row gains per step with speculation; None means 1. `decode_s` then
    includes verification."""
    prefill_s: float = 0.0
    """Per token of a prompt, and of a rollout that moves to another worker."""
    load_s: float = 0.0
    """Loading new weights into a worker, before the first rollout of a step."""
    training_s: float = 0.0
    """One update, from its last rollout to new weights that workers can load."""

    def __post_init__(self) -> None:
        for name, dtype in (("num_rows", np.int64), ("decode_s", np.float64), ("tokens_per_step", np.float64)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        rows, seconds, gains = self.num_rows, self.decode_s, self.tokens_per_step
        if rows.ndim != 1 or rows.shape != seconds.shape or rows.size < 2 or (np.diff(rows) <= 0).any() or rows[0] < 0:
            raise InputError(
                "decode steps are given for at least two numbers of rows, ascending, one time each, got "
                f"{rows.size} numbers and {seconds.size} times; give both lists alike"
            )
        if not np.isfinite(seconds).all() or seconds[0] <= 0 or (np.diff(seconds) < 0).any():
            raise InputError(f"a decode step takes time, and no less with more rows, got {seconds.tolist()}; smooth it")
        if gains is not None and (gains.shape != rows.shape or not (np.isfinite(gains) & (gains >= 1)).all()):
            raise InputError(f"a row gains at least one token a step, got {gains.tolist()}; give one number a batch")
        for name in ("prefill_s", "load_s", "training_s"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"{name} is a time, at least 0, got {getattr(self, name)!r}; correct it")

    def token_s(self, max_rows: int) -> NDArray[np.float64]:
        """float64 [B + 1]: time in which each of b running rollouts gains a token, for b from 0 to `max_rows`.

        Entry 0 is 0.
        """
        rows = np.arange(max_rows + 1)
        seconds = _beyond(rows, self.num_rows, self.decode_s)
        if self.tokens_per_step is not None:
            seconds = seconds / np.interp(rows, self.num_rows, self.tokens_per_step)
        seconds[0] = 0.0
        return seconds


Shape: TypeAlias = tuple[float, float]
"""Time of a token in a full batch, and of an update, both over the time of a token at batch size 1."""


def shape_of(latency: Latency, max_rows: int) -> Shape:
    """The ratios that plans depend on, independent of the unit of time.

    Example: steps of 20 s and 0.05 s a row, up to 64 rows, with updates of 401 s: 23.2 / 20.05 and 20.
    """
    token_s = latency.token_s(max_rows)
    return float(token_s[-1] / token_s[1]), float(latency.training_s / token_s[1])


def is_among(shape: Shape, others: Sequence[Shape]) -> bool:
    """Whether a latency needs no new plan: no ratio is more than 25 % outside the range of the others'.

    Example: (1.2, 22) is among (1.16, 20) alone, being within 25 %. (1.16, 30) is not, but is among (1.16, 20) and
    (1.16, 35). Nothing is among none.
    """
    if not others:
        return False
    figures = zip(shape, zip(*others, strict=True), strict=True)
    return all(min(known) <= _ALIKE * one and one <= _ALIKE * max(known) for one, known in figures)


def linear_latency(
    *, step_s: float, row_s: float, prefill_s: float = 0.0, load_s: float = 0.0, training_s: float = 0.0
) -> Latency:
    """Decode steps of `step_s` plus `row_s` a row.

    Example: `linear_latency(step_s=20, row_s=0.05).token_s(64)[64]` is 23.2.
    """
    return Latency(
        num_rows=np.array([0, 1]),
        decode_s=np.array([step_s, step_s + row_s]),
        prefill_s=prefill_s,
        load_s=load_s,
        training_s=training_s,
    )


def _beyond(rows: NDArray[np.int64], known: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear between the known points; constant before them, extrapolated with the last slope after them."""
    inside = np.interp(rows, known, seconds)
    slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
    return np.where(rows > known[-1], seconds[-1] + slope * (rows - known[-1]), inside)


_ALIKE = 1.25

STANDARD = linear_latency(step_s=20.0, row_s=0.05)
"""Default where nothing was measured: plans depend on how a step grows with its rows, not on the unit.

A run measures its own (`PassTimes`)."""
