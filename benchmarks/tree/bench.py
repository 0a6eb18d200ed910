"""Claim: training a tree takes less time than training its branches, close to what counted FLOPs allow, exactly.

`python -m benchmarks tree` measures three published cases with a small model (one thread, process time), the same model
on trees ten times the budget, and samples of real trajectories with a model of eight layers (all threads, wall time).
The baseline is the fastest of three tuned ways to train the branches; PrefixGrouper trains the star too where
`make peers` has installed it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs, chosen, environment, interleaved_medians, one_thread, process_seconds
from benchmarks.peers.peer import measure_peers
from benchmarks.tree.cases import SHAPE, Case, build_model, published_cases
from benchmarks.tree.partitions import PARTITIONS, measure_partitions
from benchmarks.tree.real import MAX_TOKENS, MIN_MEAN_SEGMENT, MIN_SHARING, measure_sets
from benchmarks.tree.sets import NO_DATA, SAMPLE_TOKENS, SEED, SET_NAMES, find_source, sample_sets
from benchmarks.tree.sets import SHAPE as SET_SHAPE
from benchmarks.tree.steps import BASELINES, build_steps, gradient_after, relative_error
from treering.tree.forest import Forest
from treering.tree.stats import flat_work, tree_work, work_bounds

NOTE = (
    "three cases and two trees in partitions in about four minutes, then samples of real trajectories in about 45 "
    "minutes on 2 cores; --only NAMES measures some"
)
TABLES = {
    "cases": (
        *("case", "flat_tokens", "unique_tokens", "flop_bound", "baseline", "baseline_s", "tree_s", "speedup"),
        *("grad_error", "baselines", "peers.prefix_grouper.seconds"),
    ),
    "partitions": ("tree", "seconds", "scoring_s", "num_recomputed_tokens", "saved_bytes", "grad_errors"),
    "sets": (
        *("set", "baseline", "baseline_s", "tree_s", "speedup", "counts.flop_bound", "flop_bound_share", "overhead"),
        *("saved_bytes", "flat_saved_bytes", "grad_error", "counts.flat_tokens", "counts.sharing"),
    ),
}

NUM_RUNS = 5
"""Rounds of a published case, unless the caller says how many."""


def measure(
    cases: Iterable[Case] | None = None,
    *,
    num_runs: int | None = None,
    only: Sequence[str] = (),
    sample_tokens: int | None = SAMPLE_TOKENS,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Published cases, trees in partitions and sets of real trajectories.

    `cases` replaces the published ones, and `sample_tokens` are the flat tokens of a set, about; None trains all of its
    tasks. `num_runs` of None is `NUM_RUNS` for cases, and `real.default_runs` for sets.

    Example: `measure([star(prompt=8, response=4, group=2)], only=["star"], num_runs=1)["cases"][0]["flat_tokens"]` is
    24.
    """
    cases = published_cases() if cases is None else list(cases)
    runs = NUM_RUNS if num_runs is None else num_runs
    check_runs(runs)
    names = chosen(only, [*(case.name for case in cases), PARTITIONS, *SET_NAMES])
    source = find_source()
    samples = sample_sets(source, [name for name in SET_NAMES if name in names], sample_tokens, is_named=bool(only))
    with one_thread():
        model = build_model()
        results = [measure_case(model, case, runs, on_progress) for case in cases if case.name in names]
        partitions = measure_partitions(build_model(), runs, on_progress) if PARTITIONS in names else []
    sets = measure_sets(samples, num_runs, on_progress)
    return {
        "cases": results,
        "partitions": partitions,
        "sets": sets,
        "environment": environment(
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            threads=1,
            clock="process time",
            runs=runs,
            model=asdict(SHAPE),
            dtype="float32",
            sets={
                "threads": torch.get_num_threads(),
                "clock": "wall time",
                "model": asdict(SET_SHAPE),
                "max_tokens": MAX_TOKENS,
                "sample_tokens": sample_tokens,
                "seed": SEED,
                "gate": {"sharing": MIN_SHARING, "mean_segment": MIN_MEAN_SEGMENT},
            },
        ),
        "notes": [NO_DATA] if source is None and not only else [],
    }


def measure_case(model: PreTrainedModel, case: Case, num_runs: int, on_progress: OnProgress) -> dict[str, Any]:
    """One case: medians of process time for one forward and backward of all branches, and gradients.

    `grad_error` is the relative L2 distance of the whole gradient from that of one branch at a time; a baseline must
    compute the same one. `peers` are other projects' tree trainers, where `make peers` has installed them.
    """
    steps = build_steps(model, case)
    on_progress(f"{case.name}: gradients")
    expected = gradient_after(model, steps["one_by_one"])
    errors = {name: relative_error(gradient_after(model, step), expected) for name, step in steps.items()}
    seconds = interleaved_medians(
        steps, num_runs, process_seconds, lambda done, total: on_progress(f"{case.name}: run {done} of {total}")
    )
    on_progress(f"{case.name}: peers")
    peers = measure_peers(model, case, num_runs)
    baseline = min(BASELINES, key=seconds.__getitem__)
    forest = Forest.from_sequences(case.sequences)
    best = work_bounds(flat_work(forest.branch_length), tree_work([forest]), SHAPE)
    return {
        "case": case.name,
        "flat_tokens": forest.num_branch_tokens,
        "unique_tokens": forest.num_tokens,
        "token_bound": best.token_bound,
        "flop_bound": best.flop_bound,
        "baseline": baseline,
        "baseline_s": seconds[baseline],
        "tree_s": seconds["tree"],
        "speedup": seconds[baseline] / seconds["tree"],
        "grad_error": errors["tree"],
        "baselines": {name: seconds[name] for name in BASELINES},
        "baseline_grad_errors": {name: errors[name] for name in BASELINES},
        "peers": peers,
    }
