"""The `triton` backend: kernels that read each key's range of query rows and skip blocks that no row sees.

This file checks what is supported and routes gradients. It does not import triton: `triton_launch` and `triton_kernels`
are loaded on first use.

N query rows   K keys   H query heads   G key heads   D head size
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.gateway import KeysValues
from treering.attention.layout import ScoreOptions, TreeLayout, join, scatter_key_gradients
from treering.attention.segments import AttentionOutput
from treering.attention.triton_tables import MAX_HEAD_SIZES, Tables, Tiles, choose_tiles
from treering.errors import UnsupportedError
from treering.extras import install_hint


def has_triton() -> bool:
    """Return whether triton is installed, without importing it."""
    return find_spec("triton") is not None


def triton_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    options: ScoreOptions,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
    tiles: Tiles | None = None,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention of every token over its own path; differentiable once, with bitwise reproducible gradients.

    Keys of ancestor partitions come before the own ones in one array. Scores, sums and the gradients that go into
    gateways are float32 or wider; products are in the tensors' dtype.

    Args:
        query: [1, H, N, D].
        key: [1, G, N, D].
        value: [1, G, N, D].
        layout: layout of the forest.
        options: scale, sliding window and softcap.
        sinks: [H], None for none.
        layer: index of the layer.
        tiles: tile sizes of the kernels; None for the default.

    Raises:
        UnsupportedError: the kernels do not support the device, dtype, head size or scale.
    """
    _check(query, options)
    run = _TritonRun(layout, options, layer, tiles or choose_tiles(query.shape[3], query.dtype))
    return _TritonAttention.apply(query, key, value, sinks, run)  # type: ignore[no-any-return, no-untyped-call]


class _TritonRun(NamedTuple):
    """Arguments of one layer's attention other than tensors."""

    layout: TreeLayout
    options: ScoreOptions
    layer: int
    tiles: Tiles

    @property
    def tables(self) -> Tables:
        return Tables.of(self.layout, self.options.window)


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, run: _TritonRun) -> Tensor:
        from treering.attention.triton_launch import run_forward

        if run.layout.gateway is not None:
            run.layout.gateway.export(run.layer, KeysValues(key, value))
        keys = _inner_contiguous(join(KeysValues(key, value), run.layout, run.layer))
        (inner,) = _inner_contiguous((query,))
        whole = run_forward(inner, KeysValues(*keys), sinks, run.tables, run.options, run.tiles)
        out = whole.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, whole.lse)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from treering.attention.triton_launch import run_backward, run_delta

        query, key, value, sinks, out, lse = ctx.saved_tensors
        run: _TritonRun = ctx.run
        layout = run.layout
        # Gradients to and from gateways stay float32 or wider; otherwise the kernels round once, at the end.
        is_joined = layout.gateway is not None or len(layout.ancestors) > 0
        grad_dtype = lse.dtype if is_joined else key.dtype
        inner, grad_out, saved_out = _inner_contiguous((query, grad_outputs[0], out))
        keys = KeysValues(*_inner_contiguous(join(KeysValues(key, value), layout, run.layer)))
        delta = run_delta(grad_out, saved_out)
        grad_query, grad_keys = run_backward(
            grad_out,
            inner,
            keys,
            AttentionOutput(saved_out, lse),
            delta,
            run.tables,
            run.options,
            run.tiles,
            grad_dtype,
        )
        own = scatter_key_gradients(grad_keys, layout, run.layer)
        grad_sinks = None if sinks is None else _sink_gradient(sinks, lse, delta)
        return grad_query.to(query.dtype), own.key.to(key.dtype), own.value.to(value.dtype), grad_sinks, None


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks [H]: each is a key with value 0 and gets -weight (grad_out . out) from a row."""
    from treering.attention.triton_launch import LOG2_E

    weight = (sinks.to(lse.dtype)[:, None] * LOG2_E - lse).exp2()
    return -(weight * delta).sum(1).to(sinks.dtype)


def _inner_contiguous(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Make the last axis contiguous, as kernels read it; in the interpreter also widen to float32.

    The interpreter multiplies 16-bit arrays wrongly.
    """
    from treering.attention.triton_launch import INTERPRETED

    rows = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
    return [row.to(torch.promote_types(row.dtype, torch.float32)) for row in rows] if INTERPRETED else rows


def check_supported(device: str, dtype: torch.dtype, head_size: int, scale: float, *, interpreted: bool) -> None:
    """Refuse what the kernels do not support.

    Args:
        device: type of the tensors' device.
        dtype: dtype of the tensors.
        head_size: head size of queries and keys.
        scale: factor on the scores.
        interpreted: whether the kernels run in triton's interpreter, which supports any dtype and head size.

    Raises:
        UnsupportedError: with the backend to choose instead.

    Example:
        >>> check_supported("cuda", torch.bfloat16, 128, 0.1, interpreted=False)
    """
    if scale <= 0:
        raise UnsupportedError(f"the triton backend needs a positive scale, got {scale}: choose segments")
    if interpreted:
        return
    if device != "cuda":
        raise UnsupportedError(
            f"the triton backend runs on CUDA, got tensors on {device}: choose segments; to test the kernels "
            "without a GPU, set TRITON_INTERPRET=1 before triton is imported"
        )
    if dtype not in MAX_HEAD_SIZES:
        names = ", ".join(str(known).removeprefix("torch.") for known in MAX_HEAD_SIZES)
        raise UnsupportedError(f"the triton backend computes in {names}, not in {dtype}: choose segments")
    if head_size > MAX_HEAD_SIZES[dtype]:
        raise UnsupportedError(
            f"the triton backend takes heads of at most {MAX_HEAD_SIZES[dtype]} in {dtype}, got {head_size}: choose "
            "flex or segments"
        )


def _check(query: Tensor, options: ScoreOptions) -> None:
    if not has_triton():
        raise UnsupportedError(
            f"the triton backend needs triton (Linux only): {install_hint('gpu')}, or choose flex or segments"
        )
    from treering.attention.triton_launch import INTERPRETED

    check_supported(query.device.type, query.dtype, query.shape[3], options.scale, interpreted=INTERPRETED)
