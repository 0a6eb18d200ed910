"""Workers that a policy assigns rollouts to, and the times of their decode steps, loads and updates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError, InputError
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latency:
    """Times of a worker and of the trainer.

    Example: steps of 20 s plus 0.05 s a row are `Latency(num_rows=[0, 1], decode_s=[20.0, 20.05])`: 64 rows
    take 23.2 s a step, and with 2 tokens a row and step, 11.6 s a token.
    """

    num_rows: NDArray[np.int64]
    """int64 [K], ascending: batch sizes at which decode steps were measured."""
    decode_s: NDArray[np.float64]
    """float64 [K] > 0, never falling: step time at each size; linear in between, extrapolated with the last slope."""
    tokens_per_step: NDArray[np.float64] | None = None
    """float64 [K] >= 1: tokens that a row gains per step with speculation; None means 1. `decode_s` then includes
    verification."""
    prefill_s: float = 0.0
    """Seconds per prefilled token of a prompt, or of a rollout that moves to another worker."""
    load_s: float = 0.0
    """Seconds for loading new weights into a worker, before the first rollout of a step."""
    training_s: float = 0.0
    """Seconds of one update, from its last rollout to new weights that workers can load."""

    def __post_init__(self) -> None:
        for name, dtype in (("num_rows", np.int64), ("decode_s", np.float64), ("tokens_per_step", np.float64)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        rows, seconds, gains = self.num_rows, self.decode_s, self.tokens_per_step
        if rows.ndim != 1 or rows.shape != seconds.shape or rows.size < 2 or (np.diff(rows) <= 0).any() or rows[0] < 0:
            raise InputError(
                "decode_s needs one time for each of at least two ascending num_rows, got "
                f"{rows.size} numbers and {seconds.size} times; give two lists of equal length"
            )
        if not np.isfinite(seconds).all() or seconds[0] <= 0 or (np.diff(seconds) < 0).any():
            raise InputError(
                f"a decode step must take time, and no less with more rows, got {seconds.tolist()}; smooth it"
            )
        if gains is not None and (gains.shape != rows.shape or not (np.isfinite(gains) & (gains >= 1)).all()):
            raise InputError(
                f"tokens_per_step must be at least 1 for each size, got {gains.tolist()}; give one per num_rows"
            )
        for name in ("prefill_s", "load_s", "training_s"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"{name} must be seconds >= 0, got {getattr(self, name)!r}; correct it")

    def token_s(self, max_rows: int) -> NDArray[np.float64]:
        """Return the seconds per token of each of b running rollouts, for b from 0 to `max_rows`: float64 [B + 1].

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
    """Return the ratios that placements depend on, independent of the unit of time.

    Example: steps of 20 s and 0.05 s a row, up to 64 rows, with updates of 401 s: 23.2 / 20.05 and 20.
    """
    token_s = latency.token_s(max_rows)
    return float(token_s[-1] / token_s[1]), float(latency.training_s / token_s[1])


def is_among(shape: Shape, others: Sequence[Shape]) -> bool:
    """Return whether a latency needs no new placement: no ratio is more than 25 % outside the range of the others'.

    Example: among only (1.16, 20), (1.2, 22) is, within 25 %, and (1.16, 30) is not; it is among (1.16, 20) and (1.16,
    35). Among no others, nothing is.
    """
    if not others:
        return False
    figures = zip(shape, zip(*others, strict=True), strict=True)
    return all(min(known) <= _ALIKE * one and one <= _ALIKE * max(known) for one, known in figures)


def linear_latency(
    *, step_s: float, row_s: float, prefill_s: float = 0.0, load_s: float = 0.0, training_s: float = 0.0
) -> Latency:
    """Return the latency of decode steps of `step_s` plus `row_s` per row.

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
    """Interpolate linearly between known points; constant before them, extrapolated with the last slope after them."""
    inside = np.interp(rows, known, seconds)
    slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
    return np.where(rows > known[-1], seconds[-1] + slope * (rows - known[-1]), inside)


_ALIKE = 1.25

STANDARD = linear_latency(step_s=20.0, row_s=0.05)
"""Default where nothing was measured: placements depend on how a step grows with its rows, not on the unit.

A run measures its own latency (`MeasuredTimes`)."""


Rebalancing = Literal["none", "queued", "running"]
"""What may move to another worker after a step has begun. none: nothing, so that batches do not depend on time.
queued: rollouts that have not started. running: queued and running rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Identical workers, each with its own slots, and one trainer.

    Example: `Cluster(num_workers=32, num_slots=128, max_tokens=16384, staleness=1, latency=latency)` runs 4,096
    rollouts at a time; step 3 is sampled with the weights of step 1.
    """

    num_workers: int
    """Number of rollout workers."""
    num_slots: int
    """Rollouts that a worker decodes at the same time."""
    max_tokens: int
    """Most tokens of a rollout."""
    staleness: int
    """Step k is sampled with the weights after step k - 1 - staleness, never with others."""
    latency: Latency
    """Times that the policy uses; they may be wrong. A run starts with these and then uses measured ones."""
    rebalancing: Rebalancing = "running"
    """What workers can move; policies request no more."""

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 1), ("num_slots", 1), ("max_tokens", 1), ("staleness", 0)):
            if not is_count(getattr(self, name), least=least):
                raise ConfigError(
                    f"{name} must be an integer of at least {least}, got {getattr(self, name)!r}; correct it"
                )

    def version_of(self, step: int) -> int:
        """Return the policy version that samples a step, counted from 1: max(0, step - 1 - staleness).

        Example: with staleness 1 steps 1, 2, 3 and 4 are sampled by the versions 0, 0, 1 and 2.
        """
        return max(0, step - 1 - self.staleness)


def without_moves(cluster: Cluster) -> Cluster:
    """Return the cluster with running rollouts that stay on their workers."""
    return replace(cluster, rebalancing="queued") if cluster.rebalancing == "running" else cluster
