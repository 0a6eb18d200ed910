"""Claim: on a CUDA device, too, a tree trains faster than its branches, exactly and in less memory.

`make gpu` runs this in the device machine's own python, which has torch and transformers but none of the command line's
packages. float32 and bfloat16, CUDA events, the baselines of `benchmarks.tree`. `--device cpu` runs the same code
without a device, to see that it works; its figures are nobody's claim, so it writes no file unless told.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Step, cpu_name, cuda_seconds, interleaved_medians, process_seconds, versions
from benchmarks.tree_cases import SHAPE, Case, build_model, published_cases
from benchmarks.tree_steps import BASELINES, build_steps, gradient_after, relative_error
from treering.errors import TreeringError, UnsupportedError
from treering.tree.forest import Forest
from treering.tree.stats import bounds

RESULT = Path(__file__).resolve().parent / "results" / "gpu-tree.json"
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


def measure(cases: Iterable[Case] | None = None, *, device: str = "cuda", num_runs: int = 10) -> dict[str, Any]:
    """The report: `{"cases": [GpuCaseResult...], "environment": {...}}`, ready for JSON.

    Raises:
        UnsupportedError: no CUDA device, where one is asked for.
        InputError: fewer than one run.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "this benchmark measures CUDA devices and torch finds none: run `make gpu` on a machine with one, or see "
            "that the code works with `python3 -m benchmarks.gpu --device cpu`"
        )
    cases = published_cases() if cases is None else cases
    results = [measure_case(case, dtype, device, num_runs) for case in cases for dtype in DTYPES]
    return {"cases": [asdict(result) for result in results], "environment": environment(device, num_runs)}


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
        flop_bound=bounds(forest, SHAPE).flop_bound,
        baseline=baseline,
        speedup=seconds[baseline] / seconds["tree"],
        seconds=seconds,
        grad_errors=_errors(gradients, gradients["one_by_one"]),
        grad_errors_to_float32=_errors(gradients, _float32_gradient(case, dtype, device)),
        peak_bytes=peaks,
    )


def environment(device: str, num_runs: int) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "versions": {**versions(), "cuda": torch.version.cuda if cuda else None},
        "clock": "CUDA events" if cuda else "process time",
        "runs": num_runs,
        "model": asdict(SHAPE),
    }


def _errors(gradients: dict[str, Tensor], expected: Tensor) -> dict[str, float]:
    return {name: relative_error(gradient, expected) for name, gradient in gradients.items()}


def _float32_gradient(case: Case, dtype: torch.dtype, device: str) -> Tensor:
    model = build_model(dtype=dtype, device=device).float()
    return gradient_after(model, build_steps(model, case)["one_by_one"])


def _peak_bytes(step: Step) -> int:
    """Most memory that a step allocates above what stands before it: model and last gradients."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def _print_table(report: dict[str, Any]) -> None:
    print(f"{report['environment']['device']}, median of {report['environment']['runs']}")
    for case in report["cases"]:
        seconds = "  ".join(f"{name} {1000 * value:.1f} ms" for name, value in case["seconds"].items())
        print(
            f"{case['case']:12} {case['dtype']:9} {case['speedup']:.2f}x of {case['flop_bound']:.2f}x over "
            f"{case['baseline']}  gradient error {case['grad_errors']['tree']:.0e}  {seconds}"
        )


def main() -> None:
    """Reads the arguments, measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="timed runs per case (default 10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"JSON file (with CUDA: results/{RESULT.name})")
    given = parser.parse_args()
    out = given.out or (RESULT if given.device == "cuda" else None)
    if out is not None and not out.absolute().parent.is_dir():
        parser.error(f"--out needs an existing folder, got {out}: create {out.parent} first")
    try:
        report = measure(device=given.device, num_runs=given.runs)
    except TreeringError as error:
        parser.error(str(error))
    _print_table(report)
    if out is not None:
        out.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
