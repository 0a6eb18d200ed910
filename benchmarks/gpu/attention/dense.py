"""The rate to reach: stock dense causal attention on one flat sequence, by flash and by cuDNN kernels."""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.attention.cases import HeadShape
from benchmarks.gpu.budget import Cell, in_words
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.flops import PASSES, attention_flops, tera_per_second

KERNELS = MappingProxyType({"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION})
CPU_KERNELS = MappingProxyType({"flash": SDPBackend.FLASH_ATTENTION})
"""A CPU has a flash kernel, too; cuDNN is for devices."""


def measure_dense(heads: HeadShape, length: int, stopwatch: Stopwatch) -> Cell:
    """Seconds and TFLOP/s on visible pairs of every kernel and pass, and the fastest kernel of each pass.

    A kernel that does not run here is listed with its error. The result's `rates` are TFLOP/s of the fastest.

    Raises:
        RuntimeError: no kernel runs.
    """
    kernels = KERNELS if stopwatch.device == "cuda" else CPU_KERNELS
    seconds: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    for name, kernel in kernels.items():
        try:
            seconds[name] = _seconds(heads, length, kernel, stopwatch)
        except RuntimeError as error:
            failures[name] = in_words(error)
    if not seconds:
        raise RuntimeError(f"no dense attention kernel runs: {failures}")
    num_pairs = length * (length + 1) // 2
    fastest = {of: min(seconds, key=lambda name: seconds[name][of]) for of in PASSES}
    rates = {
        of: tera_per_second(
            attention_flops(num_pairs, num_heads=heads.num_heads, head_size=heads.head_size, of=of),
            seconds[fastest[of]][of],
        )
        for of in PASSES
    }
    return {
        "heads": heads.name,
        "length": length,
        "seconds": seconds,
        "fastest": fastest,
        "rates": rates,
        "failures": failures,
    }


def time_passes(run: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad_out: Tensor, watch: Stopwatch) -> Cell:
    """Median seconds of the forward without gradients, of the backward, and of a training step's both."""
    with torch.no_grad():
        forward = watch.median(run)
    saved = [run()]
    backward = watch.median(lambda: torch.autograd.grad(saved[0], leaves, grad_out, retain_graph=True))
    saved.clear()
    both = watch.median(lambda: torch.autograd.grad(run(), leaves, grad_out))
    return {"forward": forward, "backward": backward, "both": both}


def _seconds(heads: HeadShape, length: int, kernel: SDPBackend, stopwatch: Stopwatch) -> dict[str, float]:
    def draw(num_heads: int) -> Tensor:
        shape = 1, length, num_heads, heads.head_size
        return torch.randn(shape, device=stopwatch.device, dtype=torch.float32).to(heads.dtype).transpose(1, 2)

    leaves = tuple(draw(n).requires_grad_() for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            out: Tensor = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return out

    return time_passes(run, leaves, draw(heads.num_heads), stopwatch)
