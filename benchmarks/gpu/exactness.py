"""Claim: on a CUDA device, too, a small tree gives the gradient of its branches, faster and in less memory.

float32 and bfloat16, on the three published cases, with the baselines of `benchmarks.tree.bench`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.common.timing import Step, cuda_seconds, interleaved_medians, process_seconds
from benchmarks.gpu.budget import Cell, PartReport
from benchmarks.tree.cases import SHAPE, Case, build_model
from benchmarks.tree.steps import BASELINES, build_steps, gradient_after, relative_error
from treering.tree.forest import Forest
from treering.tree.stats import flat_work, tree_work, work_bounds

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCaseResult:
    """One case in one dtype; dictionaries hold the tree and every baseline by name."""

    case: str
    dtype: str
    flat_tokens: int
    unique_tokens: int
    flop_bound: float
    baseline: str
    """Name of the fastest baseline."""
    speedup: float
    seconds: dict[str, float]
    """Medians for one forward and backward of all branches."""
    grad_errors: dict[str, float]
    """Relative L2 distance of the whole gradient from that of one branch at a time in the same dtype."""
    grad_errors_to_float32: dict[str, float]
    """The same from one branch at a time in float32, with the weights rounded to the dtype."""
    peak_bytes: dict[str, int] | None
    """Most memory allocated above model and gradients; None without a device that counts it."""


def measure_exactness(report: PartReport, cases: Iterable[Case], device: str, num_runs: int) -> None:
    """Adds every case in both dtypes to a report."""
    for case in cases:
        for dtype in DTYPES:
            name = f"{case.name} {str(dtype).removeprefix('torch.')}"
            report.run(name, lambda c=case, d=dtype: asdict(measure_case(c, d, device, num_runs)))


def measure_case(case: Case, dtype: torch.dtype, device: str, num_runs: int) -> GpuCaseResult:
    """Times every way to train one case in one dtype, and compares gradients and memory."""
    model = build_model(dtype=dtype, device=device)
    steps = build_steps(model, case)
    gradients = {name: gradient_after(model, step) for name, step in steps.items()}
    clock = cuda_seconds if device == "cuda" else process_seconds
    seconds = interleaved_medians(steps, num_runs, clock)
    peaks = {name: _peak_bytes(step) for name, step in steps.items()} if device == "cuda" else None
    baseline = min(BASELINES, key=seconds.__getitem__)
    forest = Forest.from_sequences(case.sequences)
    return GpuCaseResult(
        case=case.name,
        dtype=str(dtype).removeprefix("torch."),
        flat_tokens=forest.num_branch_tokens,
        unique_tokens=forest.num_tokens,
        flop_bound=work_bounds(flat_work(forest.branch_length), tree_work([forest]), SHAPE).flop_bound,
        baseline=baseline,
        speedup=seconds[baseline] / seconds["tree"],
        seconds=seconds,
        grad_errors=_errors(gradients, gradients["one_by_one"]),
        grad_errors_to_float32=_errors(gradients, _float32_gradient(case, dtype, device)),
        peak_bytes=peaks,
    )


def _errors(gradients: dict[str, Tensor], expected: Tensor) -> dict[str, float]:
    return {name: relative_error(gradient, expected) for name, gradient in gradients.items()}


def _float32_gradient(case: Case, dtype: torch.dtype, device: str) -> Tensor:
    model = build_model(dtype=dtype, device=device).float()
    return gradient_after(model, build_steps(model, case)["one_by_one"])


def _peak_bytes(step: Step) -> int:
    """Most memory that a step allocates above the model and the last gradients."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def print_table(report: Cell) -> None:
    """One line per case and dtype."""
    print(f"\nsmall trees on {report['environment']['device']}")
    for case in report["cases"]:
        seconds = "  ".join(f"{name} {1000 * value:.1f} ms" for name, value in case["seconds"].items())
        print(
            f"{case['case']:12} {case['dtype']:9} {case['speedup']:.2f}x of {case['flop_bound']:.2f}x over "
            f"{case['baseline']}  gradient error {case['grad_errors']['tree']:.0e}  {seconds}"
        )
