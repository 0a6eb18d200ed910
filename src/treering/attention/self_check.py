"""Checks a backend against the reference before it computes anything of a user's, once per shape in a process.

A small forest has what goes wrong: a fork within a block and one across blocks, an end that fills no block, two trees,
and a window that cuts paths where the model's layer has one. Rounding is judged by a tolerance, the mask exactly: what
a token must not see may not change a bit of its output, and takes a gradient of exactly 0.

    H query heads   G key heads   D head size
"""

import math
import os
import warnings
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treering.attention.backends import Backend, implementation
from treering.attention.form import Form
from treering.attention.layout import TreeLayout
from treering.errors import UnsupportedError
from treering.tree.forest import Forest

OFF_SWITCH = "TREERING_SELF_CHECK"
"""Environment variable; "0" leaves the check out."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest relative error. Float32: sums in another order come to 1e-6 at most, products rounded to tf32 to 1e-3."""

TOLERANCE_EPS = 4
"""The same for 16 bits, in units of their eps: weights, their gradients and results are each rounded about once."""

LAUNCHES = {"flash": 700}
"""How often a check runs a backend on CUDA: a fault in 1 of 100 launches stays unseen in 1 of 1,000 checks. Older
kernels of FlashAttention-4 had one."""

_LENGTHS = (150, 90, 37, 61)
"""Tokens of the stem, of its two branches, and of a second tree: one block of 128 and a part of another."""

_CPU_LENGTHS = (15, 9, 4, 6)
"""The same on CPU, where no backend works in blocks."""


class AttentionShape(NamedTuple):
    """What decides which code a backend runs.

    Example: a layer of Qwen3-8B on a GPU has 32 query heads and 8 key heads of size 128, in bfloat16 on cuda:0.
    """

    num_heads: int
    num_key_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    has_window: bool = False
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def form(self) -> Form:
        """Scale, window and softcap that the check uses."""
        # Any window is as good as another that cuts every path: only whether there is one is compiled.
        window = self.lengths[-1] - 2 if self.has_window else None
        return Form(scale=self.head_size**-0.5, window=window, softcap=self.softcap)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the parts of the forest that the check uses."""
        return _CPU_LENGTHS if self.device.type == "cpu" else _LENGTHS


class SelfCheck(NamedTuple):
    """What a check has found.

    Attributes:
        error: the largest relative L2 error of the output and of the gradients, against the reference in float64.
        tolerance: the largest that is accepted.
        leak: what a token took from another branch, in words; None where branches are isolated.
        has_gradients: whether gradients were compared; `flex` has none on CPU.
    """

    error: float
    tolerance: float
    leak: str | None
    has_gradients: bool

    @property
    def has_passed(self) -> bool:
        """Whether the backend may run."""
        return self.leak is None and self.error <= self.tolerance


def verify(backend: Backend, shape: AttentionShape) -> None:
    """Runs `check_backend` the first time; the reference is not checked.

    Raises:
        UnsupportedError: the backend is wrong here; with the figures, and what to choose.
    """
    if backend == "reference" or os.environ.get(OFF_SWITCH) == "0":
        return
    found = check_backend(backend, shape)
    if found.has_passed:
        return
    fault = found.leak or f"is off by {found.error:.1e} from the reference, at most {found.tolerance:.1e} is rounding"
    other = "reference" if backend == "segments" else "segments"
    raise UnsupportedError(
        f"the {backend} backend {fault} ({shape.num_heads} heads over {shape.num_key_heads} of size {shape.head_size}, "
        f"{shape.dtype}, {shape.device}): choose another one, such as {other}; {OFF_SWITCH}=0 runs it unchecked"
    )


@cache
def check_backend(backend: Backend, shape: AttentionShape) -> SelfCheck:
    """Compares a backend with the reference on a small forest, forward and backward.

    Leaves torch's random states as they are. Without compiling it takes milliseconds.

    Raises:
        UnsupportedError: the backend refuses the shape.
    """
    has_gradients = not (backend == "flex" and shape.device.type == "cpu")
    forest = _forest(shape.lengths)
    layout = TreeLayout(forest, shape.device)
    # A caller that offloads or counts what autograd saves must not see the check.
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    precise = torch.autocast(shape.device.type, enabled=False)
    unheard = warnings.catch_warnings()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients), precise, identity, unheard:
        # Torch says so in the first backward of a process, and then has its context.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        inputs = draw_inputs(shape, forest.num_tokens)
        wanted = _run("reference", [tensor.double() for tensor in inputs], layout, shape)
        got = _run(backend, inputs, layout, shape)
        num_more = LAUNCHES.get(backend, 1) - 1 if shape.device.type == "cuda" else 0
        errors = [_errors(got, wanted)]
        errors += [_errors(_run(backend, inputs, layout, shape), wanted) for _ in range(num_more)]
        error = float(torch.stack(errors).max())
        leak = _find_leak(backend, inputs, got[0], layout, shape) if math.isfinite(error) else None
    return SelfCheck(error, _tolerance(shape.dtype), leak, has_gradients)


def _forest(lengths: tuple[int, ...]) -> Forest:
    stem, first, second, other = (np.full(length, token) for token, length in enumerate(lengths))
    return Forest.from_sequences([np.concatenate([stem, first]), np.concatenate([stem, second]), other])


def draw_inputs(shape: AttentionShape, num_tokens: int) -> list[Tensor]:
    """Random queries, keys, values and a gradient of the output, [1, heads, N, D], then sinks [H] if there are any.

    The same in every call; torch's random states stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (shape.num_heads, shape.num_key_heads, shape.num_key_heads, shape.num_heads)
    shapes = [(1, count, num_tokens, shape.head_size) for count in heads]
    shapes += [(shape.num_heads,)] if shape.has_sinks else []  # type: ignore[list-item]
    return [torch.randn(size, generator=generator).to(shape.device, shape.dtype) for size in shapes]


def _run(backend: Backend, inputs: list[Tensor], layout: TreeLayout, shape: AttentionShape) -> list[Tensor]:
    """The output, then the gradients of queries, keys, values and sinks where gradients are enabled."""
    query, key, value, upstream, *rest = inputs
    leaves = [tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in (query, key, value, *rest)]
    sinks = leaves[3] if shape.has_sinks else None
    out = implementation(backend)(*leaves[:3], layout=layout, form=shape.form, sinks=sinks)
    if not torch.is_grad_enabled():
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _errors(got: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Relative L2 errors of the output and the gradients; infinite where one is no number."""
    pairs = zip(got, wanted, strict=True)
    errors = torch.stack([(mine.double() - right).norm() / right.norm().clamp_min(1e-30) for mine, right in pairs])
    return errors.nan_to_num(nan=math.inf)


def _find_leak(
    backend: Backend, inputs: list[Tensor], out: Tensor, layout: TreeLayout, shape: AttentionShape
) -> str | None:
    """What the second branch takes from the first one, in words; None if nothing."""
    _, first, second, _ = np.split(np.arange(layout.forest.num_tokens), np.cumsum(shape.lengths)[:-1])
    others = np.setdiff1d(np.arange(layout.forest.num_tokens), first)
    query, key, value, upstream, *rest = inputs
    changed = [tensor.index_fill(2, _rows(first, tensor), 3.0) for tensor in (key, value)]
    alone = torch.zeros_like(upstream).index_copy(2, _rows(second, upstream), upstream[:, :, second])
    again = _run(backend, [query, *changed, upstream, *rest], layout, shape)[0]
    if not torch.equal(again[:, :, others], out[:, :, others]):
        return "lets tokens see another branch"
    if not torch.is_grad_enabled():
        return None
    _, grad_query, grad_key, grad_value, *_ = _run(backend, [query, key, value, alone, *rest], layout, shape)
    is_zero = all(not grad[:, :, first].any() for grad in (grad_query, grad_key, grad_value))
    return None if is_zero else "gives a branch the gradient of another one"


def _rows(rows: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(tensor.device)


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, TOLERANCE_EPS * torch.finfo(dtype).eps)
