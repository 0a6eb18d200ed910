"""Claim: distilling a teacher on a tree computes teacher and student once per distinct token, close to counted FLOPs.

`python -m benchmarks distill` measures the star of the tree benchmark and samples of real trajectories, with a student
of 2 layers and a teacher of 4 wider ones, on one thread. The baseline is the fastest of the flat ways, among them the
chunked divergence of TRL's DistillationTrainer where trl 1.16 or newer is installed.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.saved_bytes import watch_saved_bytes
from benchmarks.common.timing import (
    Step,
    check_runs,
    chosen,
    environment,
    interleaved_medians,
    one_thread,
    process_seconds,
)
from benchmarks.distill.steps import BETA, build_steps, find_trl
from benchmarks.tree.cases import SHAPE as STUDENT_BASE
from benchmarks.tree.cases import Case, build_model, star
from benchmarks.tree.sets import NO_DATA, TaskSample, find_source, sample_sets
from benchmarks.tree.sets import SHAPE as TEACHER_BASE
from benchmarks.tree.steps import gradient, relative_error
from treering.tree.forest import Forest
from treering.tree.stats import Work, flat_work, train_flops, tree_work

NOTE = "a star in a minute, three samples of real trajectories in several more; --only NAMES measures some"
TABLES = {
    "batches": (
        *("name", "flat_tokens", "unique_tokens", "flop_bound", "baseline", "baseline_s", "tree_s", "speedup"),
        *("seconds", "saved_bytes", "grad_errors"),
    ),
}

STUDENT = replace(STUDENT_BASE, name="qwen3-2x256, 4096 tokens", vocab_size=TEACHER_BASE.vocab_size)
TEACHER = replace(TEACHER_BASE, name="qwen3-4x512", num_layers=4)
MAX_TOKENS = 16_384
"""Tokens of a micro-batch, for every way."""
SAMPLE_TOKENS = 5_000
SETS = ("tau", "toolbench", "math")
NUM_RUNS = 3


def measure(
    *,
    num_runs: int | None = None,
    only: Sequence[str] = (),
    sample_tokens: int = SAMPLE_TOKENS,
    case: Case | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """The star, or `case` instead, and samples of `SETS` of about `sample_tokens` flat tokens.

    Example: `measure(only=["star"], num_runs=1)["batches"][0]["flat_tokens"]` is 4,608.
    """
    runs = NUM_RUNS if num_runs is None else num_runs
    check_runs(runs)
    names = chosen(only, ["star", *SETS])
    source = find_source()
    batches: list[Case | TaskSample] = [case or star(prompt=512)] if "star" in names else []
    batches += sample_sets(source, [name for name in SETS if name in names], sample_tokens, is_named=bool(only))
    with one_thread():
        student, teacher = build_model(shape=STUDENT), build_model(shape=TEACHER).eval().requires_grad_(False)
        results = [measure_batch(student, teacher, batch, runs, on_progress) for batch in batches]
    return {
        "batches": results,
        "environment": environment(
            threads=1,
            clock="process time",
            runs=runs,
            student=asdict(STUDENT),
            teacher=asdict(TEACHER),
            dtype="float32",
            divergence={"kind": "jsd", "beta": BETA},
            max_tokens=MAX_TOKENS,
            sample_tokens=sample_tokens,
        ),
        "notes": [
            *([NO_DATA] if source is None and not only else []),
            *(["TRL's kernel was left out: trl 1.16 or newer is not installed"] if find_trl() is None else []),
        ],
    }


def measure_batch(
    student: PreTrainedModel, teacher: PreTrainedModel, batch: Case | TaskSample, num_runs: int, on_progress: OnProgress
) -> dict[str, Any]:
    """One batch: medians of process time for one forward of the teacher and a step of the student.

    `flop_bound` is that of both models; `grad_errors` are relative L2 distances of the whole gradient from that of one
    branch at a time, `saved_bytes` the most bytes kept for the backward at one time, parameters left out.
    """
    steps = build_steps(student, teacher, batch, MAX_TOKENS)
    errors: dict[str, float] = {}
    saved: dict[str, int] = {}
    expected: torch.Tensor | None = None
    for name, step in steps.items():
        on_progress(f"{batch.name}: gradient of {name}")
        saved[name] = _peak(step, student, teacher)
        got = gradient(student)
        expected = got if expected is None else expected
        errors[name] = relative_error(got, expected)
    seconds = interleaved_medians(
        steps, num_runs, process_seconds, lambda done, total: on_progress(f"{batch.name}: run {done} of {total}")
    )
    baseline = min((name for name in steps if name != "tree"), key=seconds.__getitem__)
    forests = [Forest.from_sequences(group) for group in batch.groups]
    flat = flat_work(np.array([branch.size for group in batch.groups for branch in group]))
    tree = tree_work(forests)
    return {
        "name": batch.name,
        "flat_tokens": flat.num_tokens,
        "unique_tokens": tree.num_tokens,
        "trained_tokens": batch.num_trained_tokens,
        "flop_bound": _flops(flat) / _flops(tree),
        "baseline": baseline,
        "baseline_s": seconds[baseline],
        "tree_s": seconds["tree"],
        "speedup": seconds[baseline] / seconds["tree"],
        "seconds": seconds,
        "grad_errors": errors,
        "saved_bytes": saved,
    }


def _peak(step: Step, student: PreTrainedModel, teacher: PreTrainedModel) -> int:
    with watch_saved_bytes([*student.parameters(), *teacher.parameters()]) as saved:
        step()
    return saved.peak


def _flops(work: Work) -> float:
    """A training step is counted as three forwards, and the teacher runs one."""
    size = work.num_tokens, work.num_pairs
    return train_flops(STUDENT, *size) + train_flops(TEACHER, *size) / 3
