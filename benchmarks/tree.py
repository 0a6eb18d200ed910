"""Claim: training a tree takes less time than training its branches, close to what counted FLOPs allow, exactly.

`treering bench tree` runs this: one thread, process time, three cases. The baseline is the fastest of three tuned ways
to train the branches; another project's trainer runs beside where `make peers` has installed it.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.peer import HINT, PeerResult, find_peers
from benchmarks.timing import cpu_name, interleaved_medians, one_thread, process_seconds, versions
from benchmarks.tree_cases import SHAPE, Case, build_model, published_cases
from benchmarks.tree_steps import BASELINES, build_steps, gradient_after, relative_error
from treering.tree.forest import Forest
from treering.tree.stats import bounds

__all__ = ["HINT", "CaseResult", "measure"]

OnProgress = Callable[[str], None]
"""Told in words what is being measured."""


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
    """As `grad_error`, by name: a baseline that computes something else would be none."""
    peers: dict[str, PeerResult]


def measure(
    cases: Iterable[Case] | None = None, *, num_runs: int = 5, on_progress: OnProgress = lambda words: None
) -> dict[str, Any]:
    """The report: `{"cases": [CaseResult...], "environment": {...}}`, ready for JSON.

    Raises InputError for fewer than one run, StateError for a peer that is installed and fails.

    Example: `measure([star(prompt=8, response=4, group=2)], num_runs=1)["cases"][0]["flat_tokens"]` is 24.
    """
    model = build_model()
    cases = published_cases() if cases is None else cases
    with one_thread():
        results = [measure_case(model, case, num_runs, on_progress) for case in cases]
    return {"cases": [asdict(result) for result in results], "environment": environment(num_runs)}


def measure_case(model: PreTrainedModel, case: Case, num_runs: int, on_progress: OnProgress) -> CaseResult:
    """Times every way to train one case, and compares their gradients."""
    steps = build_steps(model, case)
    on_progress(f"{case.name}: gradients")
    expected = gradient_after(model, steps["one_by_one"])
    errors = {name: relative_error(gradient_after(model, step), expected) for name, step in steps.items()}
    seconds = interleaved_medians(
        steps, num_runs, process_seconds, lambda done, total: on_progress(f"{case.name}: run {done} of {total}")
    )
    baseline = min(BASELINES, key=seconds.__getitem__)
    forest = Forest.from_sequences(case.sequences)
    best = bounds(forest, SHAPE)
    on_progress(f"{case.name}: peers")
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
        peers={peer.name: peer.measure(model, case, num_runs) for peer in find_peers() if peer.can_train(case)},
    )


def environment(num_runs: int) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "versions": versions(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "clock": "process time",
        "runs": num_runs,
        "model": asdict(SHAPE),
        "dtype": "float32",
    }
