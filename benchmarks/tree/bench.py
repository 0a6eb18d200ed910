"""Claim: training a tree takes less time than training its branches, close to what counted FLOPs allow, exactly.

`python -m benchmarks tree` measures three published cases with a small model (one thread, process time), the same model
on trees ten times the budget, and samples of real trajectories with a model of eight layers (all threads, wall time).
The baseline is the fastest of three tuned ways to train the branches; PrefixGrouper trains the star too where
`make peers` has installed it.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from benchmarks.common.timing import check_runs, cpu_name, interleaved_medians, one_thread, process_seconds, versions
from benchmarks.peers.peer import PeerResult, find_peers
from benchmarks.tree.cases import SHAPE, Case, build_model, published_cases
from benchmarks.tree.partitions import PARTITIONS, measure_partitions
from benchmarks.tree.real import MAX_TOKENS, MIN_MEAN_SEGMENT, MIN_SHARING, measure_sets
from benchmarks.tree.sets import SAMPLE_TOKENS, SEED, SET_NAMES, TaskSource, find_source
from benchmarks.tree.sets import SHAPE as SET_SHAPE
from benchmarks.tree.steps import BASELINES, build_steps, gradient_after, relative_error
from treering.data import DATA_VARIABLE
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.stats import bounds

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

NO_DATA = f"the bench sets were left out: {DATA_VARIABLE} names no folder of real data, and ../shared/data is none"
NUM_RUNS = 5
"""Rounds of a published case, unless the caller says how many."""


class OnProgress(Protocol):
    """Told what is being measured and, where known, the share of the whole that is done."""

    def __call__(self, words: str, done: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. Seconds are medians of process time for one forward and backward of all branches."""

    case: str
    flat_tokens: int
    unique_tokens: int
    token_bound: float
    flop_bound: float
    baseline: str
    """Name of the fastest baseline."""
    baseline_s: float
    tree_s: float
    speedup: float
    grad_error: float
    """Relative L2 distance of the whole gradient from that of one branch at a time."""
    baselines: dict[str, float]
    """Seconds by name."""
    baseline_grad_errors: dict[str, float]
    """As `grad_error`, by name: a baseline must compute the same gradient."""
    peers: dict[str, PeerResult]
    """Other projects' tree trainers, where `make peers` has installed them and they can train the case."""


def measure(
    cases: Iterable[Case] | None = None,
    *,
    num_runs: int | None = None,
    only: Sequence[str] = (),
    sample_tokens: int | None = SAMPLE_TOKENS,
    on_progress: OnProgress = lambda words, done=None: None,
) -> dict[str, Any]:
    """The report, ready for JSON: lists under "cases", "partitions" and "sets", the "environment", "notes" in words.

    Args:
        cases: instead of the published ones.
        num_runs: rounds; None is `NUM_RUNS` for cases, and `real.default_runs` for sets.
        only: names of cases and sets, and "partitions"; all of them when empty.
        sample_tokens: flat tokens of a set, about; None trains all of its tasks.
        on_progress: told what is being measured.

    Raises:
        InputError: fewer than one run, an unknown name, a set without real data, a broken file.

    Example: `measure([star(prompt=8, response=4, group=2)], only=["star"], num_runs=1)["cases"][0]["flat_tokens"]` is
    24.
    """
    cases = published_cases() if cases is None else list(cases)
    source = find_source()
    check_runs(NUM_RUNS if num_runs is None else num_runs)
    _check_names(only, [case.name for case in cases], source)
    chosen = [case for case in cases if case.name in only or not only]
    names = [name for name in SET_NAMES if name in only or not only]
    samples = [] if source is None else [source.sample(name, num_tokens=sample_tokens) for name in names]
    runs = num_runs or NUM_RUNS
    with one_thread():
        model = build_model()
        results = [measure_case(model, case, runs, on_progress) for case in chosen]
        has_partitions = PARTITIONS in only or not only
        partitions = measure_partitions(build_model(), runs, on_progress) if has_partitions else []
    sets = measure_sets(samples, num_runs, on_progress)
    return {
        "cases": [asdict(result) for result in results],
        "partitions": [asdict(result) for result in partitions],
        "sets": [asdict(result) for result in sets],
        "environment": environment(runs, sample_tokens),
        "notes": [NO_DATA] if source is None and not only else [],
    }


def measure_case(model: PreTrainedModel, case: Case, num_runs: int, on_progress: Callable[[str], None]) -> CaseResult:
    """Times every way to train one case, and compares their gradients."""
    steps = build_steps(model, case)
    on_progress(f"{case.name}: gradients")
    expected = gradient_after(model, steps["one_by_one"])
    errors = {name: relative_error(gradient_after(model, step), expected) for name, step in steps.items()}
    seconds = interleaved_medians(
        steps, num_runs, process_seconds, lambda done, total: on_progress(f"{case.name}: run {done} of {total}")
    )
    on_progress(f"{case.name}: peers")
    peers = {peer.name: peer.measure(model, case, num_runs) for peer in find_peers() if peer.can_train(case)}
    baseline = min(BASELINES, key=seconds.__getitem__)
    forest = Forest.from_sequences(case.sequences)
    best = bounds(forest, SHAPE)
    return CaseResult(
        case=case.name,
        flat_tokens=forest.num_branch_tokens,
        unique_tokens=forest.num_tokens,
        token_bound=best.token_bound,
        flop_bound=best.flop_bound,
        baseline=baseline,
        baseline_s=seconds[baseline],
        tree_s=seconds["tree"],
        speedup=seconds[baseline] / seconds["tree"],
        grad_error=errors["tree"],
        baselines={name: seconds[name] for name in BASELINES},
        baseline_grad_errors={name: errors[name] for name in BASELINES},
        peers=peers,
    )


def environment(num_runs: int, sample_tokens: int | None) -> dict[str, Any]:
    """What the figures depend on besides the code: of the cases, and under "sets" of the sets where it differs."""
    return {
        "versions": versions(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "clock": "process time",
        "runs": num_runs,
        "model": asdict(SHAPE),
        "dtype": "float32",
        "sets": {
            "threads": torch.get_num_threads(),
            "clock": "wall time",
            "model": asdict(SET_SHAPE),
            "max_tokens": MAX_TOKENS,
            "sample_tokens": sample_tokens,
            "seed": SEED,
            "gate": {"sharing": MIN_SHARING, "mean_segment": MIN_MEAN_SEGMENT},
        },
    }


def _check_names(only: Sequence[str], cases: Sequence[str], source: TaskSource | None) -> None:
    known = [*cases, PARTITIONS, *SET_NAMES]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise InputError(
                f"--only takes names of cases and sets, and partitions, got {name!r}; nearest names: {', '.join(near)}"
            )
        if name in SET_NAMES and source is None:
            raise InputError(f"the set {name!r} needs real data: set {DATA_VARIABLE} to a folder that has it")
