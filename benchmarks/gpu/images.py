"""Claim: on a CUDA device, too, completions after two images train near their FLOP bound, vision tower included.

The batch of `python -m benchmarks images` on the shape of Qwen2.5-VL-3B, random weights in bfloat16, layers computed
again in the backward: stock transformers' padded batch against the tree step.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from types import MappingProxyType

import torch
from torch import Tensor

from benchmarks.common.timing import cuda_seconds, wall_seconds
from benchmarks.gpu.budget import Cell, PartReport
from benchmarks.images.bench import difference
from benchmarks.images.cases import Case, forest_of, model_of
from benchmarks.images.flops import step_flops
from benchmarks.images.steps import WAYS

GOALS = MappingProxyType({"share_of_bound": 0.9})
COLUMNS = MappingProxyType(
    {
        "gradient": ("difference",),
        "speed": ("seconds", "peak_bytes", "speedup", "flop_bound", "share_of_bound"),
    }
)
"""What is printed of a case, by its kind."""

NUM_RUNS = 3


def measure_images(report: PartReport, checked: Case, measured: Case, device: str) -> None:
    """Compares the gradients of a small case, then times the other one."""
    report.run("gradient", lambda: {"kind": "gradient", "difference": gradient_difference(checked, device)})
    report.run("two images", lambda: {"kind": "speed", "batch": asdict(measured), **speed(measured, device)})


def gradient_difference(case: Case, device: str) -> float:
    """The largest difference of an entry of the two ways, relative to the largest entry."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, make in WAYS.items():
        model = model_of(case, device)
        make(model, case)()
        found[name] = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    return difference(found["tree"], found["padded_batch"])


def speed(case: Case, device: str) -> Cell:
    """Seconds of each way's runs, its peak of allocated bytes, weights included, and the speedup next to its bound."""
    model, forest = model_of(case, device), forest_of(case)
    seconds, peaks = {}, {}
    for name, make in WAYS.items():
        step = make(model, case)
        seconds[name], peaks[name] = _measured(step, device)
        model.zero_grad(set_to_none=True)
    flat, tree = step_flops(case, model, forest)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    speedup = medians["padded_batch"] / medians["tree"]
    return {
        "seconds": seconds,
        "peak_bytes": peaks,
        "speedup": speedup,
        "flop_bound": flat / tree,
        "share_of_bound": speedup * tree / flat,
        "tflops": {"padded_batch": flat / medians["padded_batch"] / 1e12, "tree": tree / medians["tree"] / 1e12},
    }


def _measured(step: Callable[[], None], device: str) -> tuple[list[float], int | None]:
    """After a first run, which compiles what is compiled."""
    step()
    if device != "cuda":
        return [wall_seconds(step)], None
    torch.cuda.reset_peak_memory_stats()
    return [cuda_seconds(step) for _ in range(NUM_RUNS)], int(torch.cuda.max_memory_allocated())
