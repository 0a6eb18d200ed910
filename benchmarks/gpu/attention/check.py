"""Checks a backend of tree attention against float32 arithmetic on sampled rows, before anything is timed.

Only sampled rows get a gradient, so the reference needs only those rows of the mask, and its gradients of all queries,
keys and values are still exact.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.attention.cases import AttentionCase
from benchmarks.tree.steps import relative_error
from treering.attention import Backend, TreeLayout, attend

NUM_ROWS = 128

MAX_ERROR = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-3}
"""Largest relative L2 distance from float32. Rounding gives a third of it: float32 products run in tf32 on a device."""


class WrongResultError(Exception):
    """A backend's result differs from the reference by more than rounding, so its speed means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Random queries [1, H, N, D], keys and values [1, G, N, D] that need gradients, and one for the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that gradients are taken of."""
        return self.query, self.key, self.value

    def without_gradients(self) -> "Inputs":
        """The same numbers for a backend that refuses inputs with `requires_grad`."""
        return replace(self, **{name: getattr(self, name).detach() for name in ("query", "key", "value")})


def draw_inputs(case: AttentionCase, device: str) -> Inputs:
    """Normal numbers, in the layout that a model's projections leave: by token, then by head."""
    heads, generator = case.heads, torch.Generator(device).manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        shape = 1, case.forest.num_tokens, num_heads, heads.head_size
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(heads.dtype)
        return numbers.transpose(1, 2)

    query, key, value = (draw(n).requires_grad_() for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
    return Inputs(query=query, key=key, value=value, grad_out=draw(heads.num_heads))


def check_backend(
    case: AttentionCase, layout: TreeLayout, inputs: Inputs, backend: Backend, *, gradients: bool = True
) -> dict[str, float]:
    """Relative L2 errors of the sampled rows' output and, unless left out, of the gradients that they give.

    Raises:
        WrongResultError: one is larger than rounding.
    """
    inputs = inputs if gradients else inputs.without_gradients()
    rows = sample_rows(case.forest.num_tokens)
    here = torch.from_numpy(rows).to(inputs.query.device)
    errors: dict[str, float] = {}
    with torch.set_grad_enabled(gradients):
        got = attend(*inputs.leaves, layout=layout, options=case.options, backend=backend)
        expected, sources = _reference_rows(case, inputs, rows, layout)
    errors["out"] = _error(got[:, :, here], expected)
    if gradients:
        upstream = torch.zeros_like(inputs.grad_out)
        upstream[:, :, here] = inputs.grad_out[:, :, here]
        given = torch.autograd.grad(got, inputs.leaves, upstream)
        wanted = torch.autograd.grad(expected, sources, inputs.grad_out[:, :, here].float())
        for name, one, other in zip(("grad_query", "grad_key", "grad_value"), given, wanted, strict=True):
            errors[name] = _error(one, other)
    largest = MAX_ERROR[case.heads.dtype]
    # Not a number is never below a bound.
    if not all(error < largest for error in errors.values()):
        raise WrongResultError(f"{backend} is off by {errors} on {case.name}, more than {largest}")
    return errors


def sample_rows(num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """At most `NUM_ROWS` rows, ascending: the first, the last, and random ones between."""
    if num_tokens <= NUM_ROWS:
        return np.arange(num_tokens)
    drawn = np.random.default_rng(9).choice(np.arange(1, num_tokens - 1), NUM_ROWS - 2, replace=False)
    return np.concatenate([[0], np.sort(drawn), [num_tokens - 1]])


def _reference_rows(
    case: AttentionCase, inputs: Inputs, rows: np.ndarray[tuple[int], np.dtype[np.int64]], layout: TreeLayout
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention of some rows in float32, [1, H, R, D], and the float32 leaves that it was computed from."""
    options, ranges = case.options, layout.ranges
    visible = (ranges.first[None, :] <= rows[:, None]) & (rows[:, None] < ranges.stop[None, :])
    if options.window is not None:
        visible &= ranges.position[rows][:, None] - ranges.position[None, :] < options.window
    mask = torch.from_numpy(visible).to(inputs.query.device)
    sources = tuple(leaf.detach().float().requires_grad_(leaf.requires_grad) for leaf in inputs.leaves)
    query, key, value = sources
    groups = query.shape[1] // key.shape[1]
    keys, values = (heads.repeat_interleave(groups, 1) for heads in (key, value))
    scores = query[:, :, torch.from_numpy(rows).to(query.device)] @ keys.mT * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values, sources


def _error(got: Tensor, expected: Tensor) -> float:
    return relative_error(got.detach().float(), expected.detach())
