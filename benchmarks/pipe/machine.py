"""Fits the speed of a pipeline's processes, by the number that run at the same time, to measured runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.pipe.passes import COLUMNS, LOAD, PASS
from treering.errors import InputError
from treering.history.budget.pass_times import non_decreasing
from treering.schedule.latency import Latency

_FEW = 30
"""A state with fewer passes counts as the one with a process fewer."""
_CLOSE = 1e-6
_MOST_TURNS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """The times of one run, on one clock."""

    records: NDArray[np.float64]
    """As `read_passes` gives them."""
    trained: NDArray[np.float64]
    """float64 [K, 2]: begin and end of each update."""
    gap_s: float
    """Of a step, in which nothing is sampled or trained: messages, rewards, advantages; 0 where steps overlap."""
    num_rollouts: int
    read_s: float
    """Taking weights out of shared memory; the engine's time for loading them is among the records."""


def merged(runs: Sequence[Observed]) -> Observed:
    """The times of several runs, one after another, as if they were one run.

    Example: runs of 2 and 3 updates are one of 5, with the mean of their gaps.
    """
    in_order = sorted(runs, key=lambda run: float(run.trained[0, 0]))
    return Observed(
        records=np.concatenate([run.records for run in in_order]),
        trained=np.concatenate([run.trained for run in in_order]),
        gap_s=sum(run.gap_s for run in in_order) / len(in_order),
        num_rollouts=sum(run.num_rollouts for run in in_order),
        read_s=sum(run.read_s for run in in_order) / len(in_order),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Times of a process that runs alone, and slowdowns by concurrent processes."""

    alone: Latency
    """Its `prefill_s` is per rollout, each with a prompt of one token; its `training_s` contains the gap of a step."""
    factors: NDArray[np.float64]
    """float64 [J + 1]: seconds of a pass with j other workers or trainers at work, over those alone."""
    update_s: float
    """Seconds that each concurrent worker adds to an update."""

    def latency(self, shares: NDArray[np.float64], num_busy: float) -> Latency:
        """Of a run whose workers and trainer have so many others at work beside them.

        Args:
            shares: float64 [J + 1], the shares of the workers' time with j others at work.
            num_busy: workers at work during an update, on average.

        Example: half of the time alone and half of it at half the speed is 1 / 0.75 times the time alone.
        """
        factor = 1.0 / float((shares / self.factors).sum())
        return replace(
            self.alone,
            decode_s=self.alone.decode_s * factor,
            prefill_s=self.alone.prefill_s * factor,
            training_s=self.alone.training_s + self.update_s * num_busy,
        )


def fit_machine(curve: Observed, others: Sequence[Observed], *, drafts: bool = False) -> Machine:
    """The machine that explains the average times of passes and updates.

    Seconds of a pass are a curve over its rows, linear between powers of 2, plus a constant for each prefilled token,
    times a factor for the processes that run beside it. Averages, not minima: messages and other programs take time in
    every run.

    Args:
        curve: a run like those to predict; gives rows, prefill and tokens per pass.
        others: two runs without drafts that give updates, gap and factors; the first without overlap.
        drafts: whether passes of `curve` verify drafts; factors are then its own.

    Raises:
        InputError: no passes with at least two numbers of rows.
    """
    # Passes that verify drafts say nothing of those that do not.
    knots, base, factors = _fit(curve, [curve] if drafts else others)
    decode_s, per_token = base[:-1], base[-1]
    kind, seconds, rows, prefilled, sampled = _columns(
        curve, "kind", "seconds", "num_rows", "num_prefilled", "num_sampled"
    )
    gain = max(1.0, float(sampled[kind == PASS].sum() / rows[kind == PASS].sum()))
    loads = seconds[kind == LOAD]
    quiet, *_ = others
    training_s, update_s = _training(others)
    alone = Latency(
        num_rows=knots,
        # Noise may make a pass free.
        decode_s=non_decreasing(np.maximum(decode_s, float(seconds[kind == PASS].min() / factors.max()))),
        tokens_per_step=np.full(knots.size, gain) if drafts else None,
        prefill_s=float(per_token * prefilled.sum()) / curve.num_rollouts,
        load_s=curve.read_s + (float(np.median(loads)) if loads.size else 0.0),
        training_s=training_s + quiet.gap_s,
    )
    return Machine(alone=alone, factors=factors, update_s=update_s)


def num_beside(run: Observed) -> NDArray[np.int64]:
    """int64 [N]: the other processes at work in the middle of each record: workers with a pass, and the trainer."""
    worker, started, seconds, kind = (run.records[:, at] for at in (-1, 1, 2, 0))
    middle = started + seconds / 2
    beside = np.zeros(worker.size, np.int64)
    for other in np.unique(worker):
        own = np.flatnonzero((worker == other) & (kind == PASS))
        spans = np.column_stack([started[own], started[own] + seconds[own]])
        beside += (worker != other) & _covered(middle, spans)
    return beside + _covered(middle, run.trained)


def mean_busy(run: Observed) -> float:
    """Workers at work during updates, on average."""
    lengths = run.trained[:, 1] - run.trained[:, 0]
    busy = 0.0
    for started, seconds in run.records[run.records[:, 0] == PASS][:, 1:3]:
        shared = np.minimum(run.trained[:, 1], started + seconds) - np.maximum(run.trained[:, 0], started)
        busy += float(np.maximum(shared, 0.0).sum())
    return busy / float(lengths.sum())


def _fit(
    curve: Observed, runs: Sequence[Observed]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Knots, seconds alone and factors that agree with each other, from `_curve` and `_factors` in turn.

    Where full batches are seldom alone and small ones seldom beside others, each turn moves them by little.
    """
    factors = np.ones(3)
    for _ in range(_MOST_TURNS):
        knots, base = _curve(curve, factors)
        before, factors = factors, _factors(runs, knots, base)
        if np.allclose(factors, before, rtol=_CLOSE, atol=0.0):
            break
    return knots, base, factors


def _curve(run: Observed, factors: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Knots, and the seconds of a process alone at each of them, then those of a prefilled token."""
    kind, seconds, rows, prefilled = _columns(run, "kind", "seconds", "num_rows", "num_prefilled")
    seen = (kind == PASS) & (rows > 0)
    if np.unique(rows[seen]).size < 2:
        raise InputError("a curve needs passes with two numbers of rows or more; sample more rollouts than fit at once")
    knots = _knots(rows[seen])
    alone = seconds[seen] / factors[np.minimum(num_beside(run)[seen], factors.size - 1)]
    design = np.column_stack([*(np.interp(rows[seen], knots, unit) for unit in np.eye(knots.size)), prefilled[seen]])
    found, *_ = np.linalg.lstsq(design, alone, rcond=None)
    if found[-1] < 0:
        # Noise: prefilling cannot save time.
        found, *_ = np.linalg.lstsq(design[:, :-1], alone, rcond=None)
        found = np.append(found, 0.0)
    return knots, found


def _factors(runs: Sequence[Observed], knots: NDArray[np.int64], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds with 0, 1 and 2 others over those of the curve, never falling."""
    real, said, count = np.zeros(3), np.zeros(3), np.zeros(3)
    for run in runs:
        kind, seconds, rows, prefilled = _columns(run, "kind", "seconds", "num_rows", "num_prefilled")
        seen = (kind == PASS) & (rows > 0)
        state = np.minimum(num_beside(run)[seen], 2)
        expected = np.interp(rows[seen], knots, base[:-1]) + base[-1] * prefilled[seen]
        for total, each in ((real, seconds[seen]), (said, expected), (count, np.ones(state.size))):
            total += np.bincount(state, each, minlength=3)
    known = count >= _FEW
    if not known.any():
        return np.ones(3)
    ratios = np.interp(np.arange(3), np.flatnonzero(known), (real / np.maximum(said, 1e-12))[known])
    return np.maximum.accumulate(ratios / ratios[0])


def _training(runs: Sequence[Observed]) -> tuple[float, float]:
    """Seconds of an update alone, and those that each worker beside it adds."""
    quiet, *busy = runs
    alone = float((quiet.trained[:, 1] - quiet.trained[:, 0]).mean())
    if not busy or mean_busy(busy[0]) < 0.1:
        return alone, 0.0
    beside = float((busy[0].trained[:, 1] - busy[0].trained[:, 0]).mean())
    return alone, max(0.0, (beside - alone) / mean_busy(busy[0]))


def _covered(times: NDArray[np.float64], spans: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each time lies in one of the spans, which do not overlap and ascend."""
    if not len(spans):
        return np.zeros(times.size, bool)
    at = np.searchsorted(spans[:, 0], times, side="right") - 1
    return (at >= 0) & (times < spans[np.maximum(at, 0), 1])


def _columns(run: Observed, *names: str) -> list[NDArray[np.float64]]:
    return [run.records[:, COLUMNS.index(name)] for name in names]


def _knots(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """The smallest and the greatest number of rows, and the powers of 2 between them."""
    least, most = int(rows.min()), int(rows.max())
    powers = [1 << power for power in range(most.bit_length()) if least < 1 << power < most]
    return np.array([least, *powers, most], np.int64)
