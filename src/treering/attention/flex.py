"""The `flex` backend: torch's FlexAttention with a block mask built from ranges of rows, never from N x N pairs.

On CUDA it is compiled, forward and backward. On CPU torch has no backward and runs the forward on dense matrices, for
tests and small forests.

    N tokens   K keys, ancestors' and own   H query heads   G key heads   D head size
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from treering.arrays import Int64Array
from treering.attention.blocks import find_block_pairs
from treering.attention.gateway import KeysValues
from treering.attention.layout import ScoreOptions, TreeLayout, join_differentiably, to_device
from treering.errors import UnsupportedError
from treering.tree.partition import QueryRanges

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

BLOCK_SIZE = 128
"""Rows and keys of a block: torch's default, for which its kernels are tuned."""

MAX_COMPILED = 64
"""Compiled versions that torch may keep: one per head shape, dtype, softcap, and with or without a window."""


def flex_attention_on_forest(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    options: ScoreOptions,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention of every token over its own path; differentiable on CUDA.

    A sink is applied at the end: it takes `sigmoid(sink - lse)` of each row's weight and has no value.

    Args:
        query: [1, H, N, D].
        key: [1, G, N, D].
        value: [1, G, N, D].
        layout: layout of the forest.
        options: scale, sliding window and softcap.
        sinks: [H], None for none.
        layer: index of the layer.

    Raises:
        UnsupportedError: a gradient is needed on CPU.
    """
    keys = join_differentiably(KeysValues(key, value), layout, layer)
    run: Callable[..., tuple[Tensor, AuxOutput]] = _compiled() if query.device.type == "cuda" else _dense
    _check_differentiable(query, *keys, sinks)
    window = layout.effective_window(options.window)
    mask = layout.once(f"flex mask, window {window}", lambda: block_mask(layout, window))
    arguments: dict[str, Any] = {"score_mod": _capping(options.softcap), "block_mask": mask, "scale": options.scale}
    arguments |= {"enable_gqa": query.shape[1] != key.shape[1], "return_aux": AuxRequest(lse=sinks is not None)}
    out, aux = run(query, *keys, **arguments)
    if sinks is None:
        return out
    assert aux.lse is not None
    kept = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
    return (out * kept[..., None]).to(query.dtype)


def block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    """Return the block mask of a layout, from block lists in O(N + K + pairs of blocks).

    Example: a prompt of 128 tokens and two responses of 128 visit five blocks of nine, two of them without a mask.
    """
    ranges = layout.joined_ranges()
    num_queries, num_keys = layout.forest.num_tokens, ranges.first.size
    pairs = find_block_pairs(ranges, layout.ranges.position, query_size=BLOCK_SIZE, key_size=BLOCK_SIZE, window=window)
    # Torch takes the number of columns from the lists' width.
    num_masked, masked, num_full, full = pairs.lists(layout.device, is_square=True)
    return BlockMask.from_kv_blocks(
        num_masked,
        masked,
        num_full,
        full,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=_visibility(ranges, layout.ranges.position, window, layout.device),
        seq_lengths=(num_queries, num_keys),
    )


def _visibility(ranges: QueryRanges, query_position: Int64Array, window: int | None, device: torch.device) -> MaskMod:
    """Return the mask inside blocks. A window is a limit per key, so that compiled code does not depend on its size.

    Torch traces these functions, so they must not contain a run-time type check.
    """
    first, stop, limit, position = (
        to_device(array.astype(np.int32), device)
        for array in (ranges.first, ranges.stop, ranges.position + (window or 0), query_position)
    )

    @no_type_check
    def on_path(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (first[key] <= row) & (row < stop[key])

    @no_type_check
    def on_path_within_window(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (first[key] <= row) & (row < stop[key]) & (position[row] < limit[key])

    chosen: MaskMod = on_path if window is None else on_path_within_window
    return chosen


@cache
def _capping(softcap: float | None) -> ScoreMod | None:
    """Return the score modification: one function object per softcap, so that it is compiled once."""
    if softcap is None:
        return None

    @no_type_check
    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    change: ScoreMod = capped
    return change


@cache
def _compiled() -> Callable[..., Any]:
    """Compile FlexAttention for any number of tokens. Too many versions raise instead of silently running dense."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)

    def run(*tensors: Tensor, **arguments: Any) -> Any:
        # Softcap and scale must be constants: torch cannot lower a symbolic number inside a score modification.
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED, specialize_float=True):
            return compiled(*tensors, **arguments)

    return run


def _dense(*tensors: Tensor, **arguments: Any) -> Any:
    """Run FlexAttention uncompiled; on CPU it refuses tensors that require gradients."""
    dense: Callable[..., Any] = flex_attention
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return dense(*(tensor.detach() for tensor in tensors), **arguments)


def _check_differentiable(*tensors: Tensor | None) -> None:
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    device = next(x.device.type for x in tensors if x is not None)
    if needs_gradient and device == "cpu":
        raise UnsupportedError(
            "the flex backend has no backward on CPU, because torch has none: choose segments (or reference, on small "
            "forests), or run under torch.no_grad()"
        )
