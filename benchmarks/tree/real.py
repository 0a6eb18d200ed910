"""One bench set: how long each way to train it takes, what the tree step saves, and what it keeps in memory.

The first round runs every way and compares gradients; later ones run the tree step and the baselines that could
still be the fastest.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.common.saved_bytes import watch_saved_bytes
from benchmarks.common.timing import Step, interleaved_seconds, wall_seconds
from benchmarks.tree.cases import build_model
from benchmarks.tree.sets import SHAPE, TaskSample, num_flat_tokens
from benchmarks.tree.steps import BASELINES, build_steps, gradient, relative_error
from treering.objectives import sft
from treering.train.step_plan import plan_step
from treering.tree.forest import Forest
from treering.tree.stats import flat_work, tree_work, work_bounds
from treering.types import TokenIds

MAX_TOKENS = 16_384
"""Tokens of a micro-batch, for every way."""

MAX_LAG = 1.1
"""A baseline that takes this much longer than the fastest one in the first round is not run again."""

WATCHED = ("tree", "packed_chains")
"""Ways whose saved bytes are counted: both fill micro-batches up to the same number of tokens."""

OnShare = Callable[[str, float], None]
"""Told what is being measured, and the share of the sets that is done."""

MIN_SHARING = 0.4
MIN_MEAN_SEGMENT = 32.0
"""Sets with that much sharing in segments that long are held to a share of the FLOP bound."""

NUM_RUNS = 3
"""Rounds of a set that is held to something; one of the others, unless the caller says how many."""


def count(sample: TaskSample) -> dict[str, Any]:
    """Tokens, sharing and bounds of a sample with the model `SHAPE`; `gated` sets are held to a share of the bound.

    Example: one task of [5, 6, 7] and [5, 6, 8] has 6 flat and 4 unique tokens, sharing 0.33 and mean segment 1.33.
    """
    forests = [Forest.from_sequences(group) for group in sample.groups]
    lengths = np.array([sequence.size for group in sample.groups for sequence in group])
    flat, tree = flat_work(lengths), tree_work(forests)
    bounds, sharing = work_bounds(flat, tree, SHAPE), 1.0 - tree.num_tokens / flat.num_tokens
    mean_segment = sum(forest.num_tokens for forest in forests) / sum(forest.num_segments for forest in forests)
    return {
        "num_tasks": len(forests),
        "num_tasks_of_set": sample.num_tasks_of_set,
        "num_branches": lengths.size,
        "flat_tokens": flat.num_tokens,
        "unique_tokens": tree.num_tokens,
        "trained_tokens": sample.num_trained_tokens,
        "sharing": sharing,
        "mean_segment": mean_segment,
        "token_bound": bounds.token_bound,
        "flop_bound": bounds.flop_bound,
        "gated": sharing >= MIN_SHARING and mean_segment >= MIN_MEAN_SEGMENT,
    }


def default_runs(counts: Mapping[str, Any]) -> int:
    """Rounds where the caller names none: `NUM_RUNS` for a set that is gated or shares nothing, else one."""
    return NUM_RUNS if counts["gated"] or counts["sharing"] == 0.0 else 1


def tokens_at_peak(groups: Sequence[Sequence[TokenIds]], max_tokens: int) -> int:
    """Tokens whose activations are alive at one time when each group is trained as a tree on CPU, parents kept.

    Example: groups [5, 6, 7] + [5, 6, 8] and [9, 9] are trees of 4 and 2 tokens: 6 under a budget of 6, else 4.
    """
    forests = [Forest.from_sequences(group) for group in groups]
    plan = plan_step(forests, sft(), max_tokens, device=torch.device("cpu"))
    whole = [batch.forest.num_tokens for batch in plan.micro_batches]
    return max([*whole, *(tree.chain_tokens for tree in plan.partitioned)], default=0)


def measure_sets(samples: Sequence[TaskSample], num_runs: int | None, on_share: OnShare) -> list[dict[str, Any]]:
    """Measures sets one after another, all with one model; `num_runs` of None is `default_runs` for each."""
    if not samples:
        return []
    model = build_model(shape=SHAPE)
    _warm_up(model, samples[0])
    results = []
    for number, sample in enumerate(samples):
        counts = count(sample)

        def on_way(way: str, name: str = sample.name, done: float = number / len(samples)) -> None:
            on_share(f"{name}: {way}", done)

        runs = num_runs or default_runs(counts)
        results.append(measure_set(model, sample, counts, num_runs=runs, on_way=on_way))
    return results


def _warm_up(model: PreTrainedModel, sample: TaskSample) -> None:
    """Runs every way on two branches, so that loading and compiling on first use is not timed."""
    task = min(sample.tasks, key=num_flat_tokens)
    pair = replace(task, sequences=task.sequences[:2], loss_masks=task.loss_masks[:2])
    for step in build_steps(model, replace(sample, tasks=(pair,)), MAX_TOKENS).values():
        step()


def measure_set(
    model: PreTrainedModel,
    sample: TaskSample,
    counts: Mapping[str, Any],
    *,
    num_runs: int,
    on_way: Callable[[str], None] = lambda way: None,
) -> dict[str, Any]:
    """Times every way to train a sample, compares their gradients and counts what the tree step keeps in memory.

    Seconds are medians of wall time for one forward and backward of all branches; `overhead` is how much longer the
    tree step takes where nothing is shared. `saved_bytes` are the most that it kept for its backward at one time,
    parameters left out, of `tokens_at_peak`; `flat_saved_bytes` the same of packed chains with the same micro-batches.

    Raises:
        InputError: fewer than one run.
    """
    steps = build_steps(model, sample, MAX_TOKENS)
    seconds, errors, saved = _first_round(model, steps, on_way)
    if num_runs != 1:
        later = {name: steps[name] for name in ("tree", *fastest_baselines(seconds))}
        on_way(f"{', '.join(later)} in turns")
        for name, times in interleaved_seconds(later, num_runs - 1, wall_seconds).items():
            seconds[name] += times
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    baseline = min(fastest_baselines(seconds), key=medians.__getitem__)
    speedup = medians[baseline] / medians["tree"]
    return {
        "set": sample.name,
        "counts": counts,
        "baseline": baseline,
        "baseline_s": medians[baseline],
        "tree_s": medians["tree"],
        "speedup": speedup,
        "flop_bound_share": speedup / counts["flop_bound"],
        "overhead": paired_overhead(seconds["tree"], seconds[baseline]) if counts["sharing"] == 0.0 else None,
        "seconds": seconds,
        "grad_error": errors["tree"],
        "baseline_grad_errors": {name: errors[name] for name in BASELINES},
        "saved_bytes": saved["tree"],
        "flat_saved_bytes": saved["packed_chains"],
        "tokens_at_peak": tokens_at_peak(sample.groups, MAX_TOKENS),
        "flat_tokens_at_peak": tokens_at_peak([[branch] for group in sample.groups for branch in group], MAX_TOKENS),
    }


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


def _first_round(
    model: PreTrainedModel, steps: Mapping[str, Step], on_way: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, int]]:
    """Every way once: its seconds, its gradient's error and, of those that are watched, its saved bytes."""
    seconds: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    saved_bytes: dict[str, int] = {}
    expected = None
    for name, step in steps.items():
        on_way(name)
        # Counting costs microseconds for each saved tensor: seconds where micro-batches are many, nothing here.
        with watch_saved_bytes(model.parameters()) if name in WATCHED else nullcontext() as saved:
            seconds[name] = [wall_seconds(step)]
        if saved is not None:
            saved_bytes[name] = saved.peak
        got = gradient(model)
        expected = got if expected is None else expected
        errors[name] = relative_error(got, expected)
    return seconds, errors, saved_bytes
