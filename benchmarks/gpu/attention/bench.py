"""Claim: our tree attention is faster than FlexAttention and near the rate of dense causal flash attention.

Measures every backend on forests of several shapes, forward and backward, in TFLOP/s on visible pairs, and flash and
cuDNN attention on flat sequences with the same heads. A backend is checked against float32 before it is timed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from benchmarks.gpu.attention.cases import AttentionCase, HeadShape
from benchmarks.gpu.attention.check import Inputs, check_backend, draw_inputs
from benchmarks.gpu.attention.dense import measure_dense, time_passes
from benchmarks.gpu.budget import Cell, PartReport, in_words
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.flops import PASSES, attention_flops, num_visible_pairs, tera_per_second
from treering.attention import BACKENDS, Backend, TreeLayout, attend
from treering.errors import UnsupportedError

OURS, RIVAL = "triton", "flex"
GOALS = MappingProxyType({"speedup_over_flex": 1.3, "best_share_of_dense": 0.9})

COLUMNS = MappingProxyType(
    {"dense": ("rates", "fastest"), "tree": ("tflops", "speedup_over_flex", "share_of_dense", "dense_length")}
)
"""What is printed of a case, by its kind."""

Dense = list[Cell]
"""Results of `measure_dense`, those of all lengths and heads."""


def measured_backends() -> list[Backend]:
    """All backends but the reference, whose mask is N x N; ours first."""
    names = [backend for backend in BACKENDS if backend != "reference"]
    return sorted(names, key=lambda name: name != OURS)


def measure_attention(
    report: PartReport,
    cases: Sequence[AttentionCase],
    lengths: Sequence[int],
    stopwatch: Stopwatch,
    backends: Sequence[Backend],
) -> None:
    """Adds dense attention for every head shape, then all cases, to a report."""
    dense: Dense = []
    for heads in dict.fromkeys(case.heads for case in cases):
        for length in lengths:
            found = report.run(f"dense {heads.name} {length}", lambda h=heads, n=length: _dense(h, n, stopwatch))
            dense += [] if found is None else [found]
    # A backward is timed many times on one forward, whose buffers compiled code would else reuse.
    with functorch_config.patch(donated_buffer=False):
        for case in cases:
            name = f"{case.heads.name} {case.name}"
            report.run(name, lambda c=case: measure_case(c, dense, stopwatch, backends, report))


def measure_case(
    case: AttentionCase,
    dense: Dense,
    stopwatch: Stopwatch,
    backends: Sequence[Backend],
    report: PartReport,
) -> Cell:
    """One forest with one head shape: each backend's errors, seconds and rates, and how they compare."""
    layout = TreeLayout(case.forest, torch.device(stopwatch.device))
    inputs = draw_inputs(case, stopwatch.device)
    ways = {name: _measured(case, layout, inputs, name, stopwatch, report) for name in backends}
    num_pairs = num_visible_pairs(case.forest, case.window)
    seconds = {name: way["seconds"] for name, way in ways.items()}
    rates = {name: _rates(case.heads, num_pairs, times) for name, times in seconds.items()}
    beside = nearest_dense(dense, case.heads, case.forest.num_tokens)
    dense_rates = {} if beside is None else beside["rates"]
    return {
        "kind": "tree",
        "heads": case.heads.name,
        "forest": case.name,
        "dtype": str(case.heads.dtype).removeprefix("torch."),
        "num_tokens": case.forest.num_tokens,
        "num_trees": case.forest.num_trees,
        "num_visible_pairs": num_pairs,
        "window": case.window,
        "softcap": case.softcap,
        "ways": ways,
        "tflops": rates,
        "dense_length": None if beside is None else beside["length"],
        "share_of_dense": {name: _over(rate, dense_rates) for name, rate in rates.items()},
        "speedup_over_flex": _over(seconds[RIVAL], seconds[OURS]) if {OURS, RIVAL} <= seconds.keys() else {},
    }


def nearest_dense(dense: Dense, heads: HeadShape, num_tokens: int) -> Cell | None:
    """The dense result of the same heads whose length is nearest; None where there is none.

    Example: 24,576 tokens are compared with dense attention over 32,768, not over 8,192.
    """
    same = [found for found in dense if found["heads"] == heads.name]
    return min(same, key=lambda found: abs(found["length"] - num_tokens), default=None)


def _dense(heads: HeadShape, length: int, stopwatch: Stopwatch) -> Cell:
    return {"kind": "dense", **measure_dense(heads, length, stopwatch)}


def _measured(
    case: AttentionCase, layout: TreeLayout, inputs: Inputs, backend: Backend, watch: Stopwatch, report: PartReport
) -> Cell:
    """One backend: errors, seconds by pass, seconds to warm up, peak memory, and the text of a refusal."""
    way: dict[str, Any] = {"errors": {}, "seconds": {}, "warm_up_s": None, "peak_bytes": None, "refused": None}
    began = time.perf_counter()
    try:
        way["errors"], run = _checked(case, layout, inputs, backend, way)
        way["warm_up_s"] = time.perf_counter() - began
        with peak_memory(way, watch.device):
            way["seconds"] = _seconds(run, inputs, watch, has_gradients=way["refused"] is None)
    except UnsupportedError as error:
        way["refused"] = in_words(error)
    except Exception as error:
        # One backend's failure must not lose the others' figures; the report lists it.
        report.fail(f"{case.heads.name} {case.name}, {backend}", in_words(error))
    return way


@contextmanager
def peak_memory(way: Cell, device: str) -> Iterator[None]:
    """Writes the most bytes that a block has allocated on a device, inputs included, into `way`."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield
    if device == "cuda":
        way["peak_bytes"] = int(torch.cuda.max_memory_allocated())


def _seconds(run: Callable[[], Tensor], inputs: Inputs, watch: Stopwatch, *, has_gradients: bool) -> dict[str, float]:
    if has_gradients:
        return time_passes(run, inputs.leaves, inputs.grad_out, watch)
    with torch.no_grad():
        return {"forward": watch.median(run)}


def _checked(
    case: AttentionCase, layout: TreeLayout, inputs: Inputs, backend: Backend, way: Cell
) -> tuple[dict[str, float], Callable[[], Tensor]]:
    """Errors of a backend, forward only where it refuses gradients, and a call of it to time."""

    def call(leaves: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        return lambda: attend(*leaves, layout=layout, options=case.options, backend=backend)

    try:
        return check_backend(case, layout, inputs, backend), call(inputs.leaves)
    except UnsupportedError as error:
        way["refused"] = in_words(error)
        errors = check_backend(case, layout, inputs, backend, gradients=False)
        return errors, call(inputs.without_gradients().leaves)


def _rates(heads: HeadShape, num_pairs: int, seconds: dict[str, float]) -> dict[str, float]:
    return {
        of: tera_per_second(
            attention_flops(num_pairs, num_heads=heads.num_heads, head_size=heads.head_size, of=of), value
        )
        for of, value in seconds.items()
    }


def _over(upper: dict[str, float], lower: dict[str, float]) -> dict[str, float]:
    """Ratios of the passes that both have."""
    return {of: upper[of] / lower[of] for of in PASSES if of in upper and of in lower}
