"""What the device does in one step: milliseconds busy and idle, and by group of kernels, from torch's profiler."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.timing import Step
from benchmarks.gpu.budget import Cell

Group = Literal["products", "attention", "head", "elementwise"]

ATTENTION = (
    "cudnn",
    "flash",
    "fmha",
    "sdpa",
    "cute",
    "visit",
    "key_gradient",
    "query_gradient",
    "delta_kernel",
    "add_slots",
)
HEAD = ("cross_entropy", "_statistics_kernel", "_target_kernel")
LOOKUPS = ("embedding", "index")
PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")
"""Parts of names of kernels. Attention is looked for first, since CUTLASS is in some of its names; lookups of rows have
the vocabulary among their sizes and are not the head's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, copy or fill on the device.

    Attributes:
        name: of the kernel.
        start_us, stop_us: on the device's clock.
        shapes: of the inputs of the operation that launched it; empty where that is unknown.
    """

    name: str
    start_us: float
    stop_us: float
    shapes: tuple[tuple[int, ...], ...] = ()


def profile_step(step: Step, vocab_size: int) -> Cell:
    """The groups of one step on a CUDA device, as `summarize` has them; the profiler runs the step once more."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    return summarize(kernels_of(profiler.profiler.kineto_results.events()), vocab_size)


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """The device's events with the shapes of the operations that launched them."""
    events = list(events)
    on_cpu = torch.autograd.DeviceType.CPU
    shapes = {event.correlation_id(): event.shapes() for event in events if event.device_type() == on_cpu}
    return [
        Kernel(
            name=event.name(),
            start_us=event.start_ns() / 1e3,
            stop_us=(event.start_ns() + event.duration_ns()) / 1e3,
            shapes=tuple(tuple(shape) for shape in shapes.get(event.linked_correlation_id(), ())),
        )
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]


def summarize(kernels: Iterable[Kernel], vocab_size: int) -> Cell:
    """Milliseconds between the first start and the last end: busy, idle, and by group.

    Example: a product from 0 to 3 us and a copy from 5 to 6 us are 0.004 ms busy, 0.002 idle, in groups 0.003 and
    0.001.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    busy_us, end_us = 0.0, ordered[0].start_us if ordered else 0.0
    groups: Counter[Group] = Counter()
    for kernel in ordered:
        busy_us += max(0.0, kernel.stop_us - max(kernel.start_us, end_us))
        end_us = max(end_us, kernel.stop_us)
        groups[group_of(kernel, vocab_size)] += kernel.stop_us - kernel.start_us  # type: ignore[assignment]
    span_us = end_us - ordered[0].start_us if ordered else 0.0
    return {
        "num_kernels": len(ordered),
        "busy_ms": busy_us / 1e3,
        "idle_ms": (span_us - busy_us) / 1e3,
        "group_ms": {group: time_us / 1e3 for group, time_us in groups.most_common()},
    }


def group_of(kernel: Kernel, vocab_size: int) -> Group:
    """By its name, and as the head's by the vocabulary among the sizes of the operation that launched it.

    Example: a product of [7067, 2048] with [2048, 151936] is the head's, one with [2048, 6144] is not.
    """
    name = kernel.name.lower()

    def named(parts: Sequence[str]) -> bool:
        return any(part in name for part in parts)

    if named(ATTENTION):
        return "attention"
    of_vocabulary = any(vocab_size in shape for shape in kernel.shapes) and not named(LOOKUPS)
    if of_vocabulary or named(HEAD) or name == "_gradient_kernel":
        return "head"
    return "products" if named(PRODUCTS) else "elementwise"
