"""One bench set: how long each way to train it takes, what the tree step saves, and what it keeps in memory.

Knows rounds, clocks and counts. The first round runs every way and compares gradients; later ones run the tree step and
the baselines that could still be the fastest. Knows nothing of files.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from benchmarks.common.saved_bytes import watch_saved_bytes
from benchmarks.common.timing import Step, interleaved_seconds, wall_seconds
from benchmarks.tree.cases import build_model
from benchmarks.tree.counts import SetCounts, count, default_runs, tokens_at_peak, work_of
from benchmarks.tree.sets import SHAPE, TaskSample, num_flat_tokens
from benchmarks.tree.steps import BASELINES, build_steps, gradient, relative_error

MAX_TOKENS = 16_384
"""Tokens of a micro-batch, for every way."""

MAX_LAG = 1.1
"""A baseline that takes this much longer than the fastest one in the first round is not run again."""

WATCHED = ("tree", "packed_chains")
"""Ways whose saved bytes are counted: both fill micro-batches up to the same number of tokens."""

OnWay = Callable[[str, int], None]
"""Told the name of a way that has finished a round, and the tokens that it computed."""

OnShare = Callable[[str, float], None]
"""Told in words what is being measured, and the share of all work that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One set. Seconds are medians of wall time for one forward and backward of all branches."""

    set: str
    counts: SetCounts
    baseline: str
    """Name of the fastest baseline."""
    baseline_s: float
    tree_s: float
    speedup: float
    flop_bound_share: float
    """Speedup over FLOP bound."""
    overhead: float | None
    """Where nothing is shared: median over rounds of tree seconds / baseline seconds, less 1; else None."""
    seconds: dict[str, list[float]]
    """Every run of every way, by name."""
    grad_error: float
    """Relative L2 distance of the tree step's whole gradient from that of one branch at a time."""
    baseline_grad_errors: dict[str, float]
    saved_bytes: int
    """Most bytes that the tree step kept for its backward at one time, parameters left out."""
    flat_saved_bytes: int
    """The same of packed chains with the same budget of tokens per micro-batch."""
    tokens_at_peak: int
    """Tokens of the largest micro-batch or chain of partitions that the tree step kept them for."""
    flat_tokens_at_peak: int


def measure_sets(
    samples: Sequence[TaskSample], num_runs: int | None, on_share: OnShare, *, max_tokens: int = MAX_TOKENS
) -> list[SetResult]:
    """Measures sets one after another, all with one model; `num_runs` of None is `default_runs` for each."""
    if not samples:
        return []
    counts = [count(sample) for sample in samples]
    runs = [num_runs or default_runs(of_set) for of_set in counts]
    meter = _Meter(sum(work_of(*pair) for pair in zip(counts, runs, strict=True)), on_share)
    model = build_model(shape=SHAPE)
    _warm_up(model, samples[0], max_tokens)
    return [
        measure_set(model, sample, of_set, num_runs=n, max_tokens=max_tokens, on_way=meter.told_of(sample.name))
        for sample, of_set, n in zip(samples, counts, runs, strict=True)
    ]


def _warm_up(model: PreTrainedModel, sample: TaskSample, max_tokens: int) -> None:
    """Runs every way on two branches: what is loaded and compiled on first use is no way's time."""
    task = min(sample.tasks, key=num_flat_tokens)
    pair = replace(task, sequences=task.sequences[:2], loss_masks=task.loss_masks[:2])
    for step in build_steps(model, replace(sample, tasks=(pair,)), max_tokens).values():
        step()


def measure_set(
    model: PreTrainedModel,
    sample: TaskSample,
    counts: SetCounts,
    *,
    num_runs: int,
    max_tokens: int = MAX_TOKENS,
    on_way: OnWay = lambda name, num_tokens: None,
) -> SetResult:
    """Times every way to train a sample, compares their gradients and counts what the tree step keeps in memory.

    Raises:
        InputError: fewer than one run.
    """
    steps = build_steps(model, sample, max_tokens)
    first = _FirstRound(model, steps, counts, on_way)
    seconds = first.seconds
    if num_runs != 1:
        later = {name: _told(steps[name], name, counts, on_way) for name in ("tree", *fastest_baselines(seconds))}
        for name, times in interleaved_seconds(later, num_runs - 1, wall_seconds).items():
            seconds[name] += times
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    baseline = min(fastest_baselines(seconds), key=medians.__getitem__)
    speedup = medians[baseline] / medians["tree"]
    return SetResult(
        set=sample.name,
        counts=counts,
        baseline=baseline,
        baseline_s=medians[baseline],
        tree_s=medians["tree"],
        speedup=speedup,
        flop_bound_share=speedup / counts.flop_bound,
        overhead=paired_overhead(seconds["tree"], seconds[baseline]) if counts.sharing == 0.0 else None,
        seconds=seconds,
        grad_error=first.errors["tree"],
        baseline_grad_errors={name: first.errors[name] for name in BASELINES},
        saved_bytes=first.saved_bytes["tree"],
        flat_saved_bytes=first.saved_bytes["packed_chains"],
        tokens_at_peak=tokens_at_peak(sample.groups, max_tokens),
        flat_tokens_at_peak=tokens_at_peak([[branch] for group in sample.groups for branch in group], max_tokens),
    )


def fastest_baselines(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The baselines whose first run is within `MAX_LAG` of the fastest one's.

    Example: first runs of 10, 12 and 10.5 seconds leave the first and the last.
    """
    fastest = min(seconds[name][0] for name in BASELINES)
    return [name for name in BASELINES if seconds[name][0] <= MAX_LAG * fastest]


def paired_overhead(tree: Sequence[float], baseline: Sequence[float]) -> float:
    """How much longer the tree step takes, by the median of the rounds' ratios: what slows a round slows both sides.

    Example: 1.1, 2.2 and 1.0 seconds against 1.0, 2.0 and 1.0 are 10 % more.
    """
    return statistics.median(a / b for a, b in zip(tree, baseline, strict=True)) - 1.0


class _Meter:
    """How much of the expected work is done, in tokens; more work than expected counts as almost done."""

    def __init__(self, expected: int, on_share: OnShare) -> None:
        self._expected, self._done, self._on_share = expected, 0, on_share

    def told_of(self, name: str) -> OnWay:
        self._on_share(f"{name}: one_by_one", self._share)

        def on_way(way: str, num_tokens: int) -> None:
            self._done += num_tokens
            self._on_share(f"{name}: {way} done", self._share)

        return on_way

    @property
    def _share(self) -> float:
        return min(self._done / self._expected, 0.99)


class _FirstRound:
    """Every way once: its seconds, its gradient's error and, of those that are watched, its saved bytes."""

    def __init__(self, model: PreTrainedModel, steps: Mapping[str, Step], counts: SetCounts, on_way: OnWay) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.errors: dict[str, float] = {}
        self.saved_bytes: dict[str, int] = {}
        expected = None
        for name, step in steps.items():
            self.seconds[name] = [self._run(model, name, step)]
            got = gradient(model)
            expected = got if expected is None else expected
            self.errors[name] = relative_error(got, expected)
            on_way(name, _num_computed(name, counts))

    def _run(self, model: PreTrainedModel, name: str, step: Step) -> float:
        # Counting costs microseconds for each saved tensor: seconds where micro-batches are many, nothing here.
        if name not in WATCHED:
            return wall_seconds(step)
        with watch_saved_bytes(model.parameters()) as saved:
            seconds = wall_seconds(step)
        self.saved_bytes[name] = saved.peak
        return seconds


def _told(step: Step, name: str, counts: SetCounts, on_way: OnWay) -> Step:
    def told() -> None:
        step()
        on_way(name, _num_computed(name, counts))

    return told


def _num_computed(name: str, counts: SetCounts) -> int:
    return counts.unique_tokens if name == "tree" else counts.flat_tokens
