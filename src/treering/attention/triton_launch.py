"""Run the kernels on tensors: grids, strides, launch options. Importing this file imports triton.

H query heads   G key heads   N query rows   K keys   D head size
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treering.attention.gateway import KeysValues
from treering.attention.layout import ScoreOptions
from treering.attention.segments import AttentionOutput, token_major
from treering.attention.triton_kernels import (
    INTERPRETED,
    add_slots_kernel,
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from treering.attention.triton_tables import Tables, Tiles, launches, padded_size

LOG2_E = math.log2(math.e)

DELTA_ROWS = 64
"""Rows per program of the kernel that computes delta for a backward."""

SLOT_ROWS = 16
"""Keys per program of the kernel that adds slots; divides every tile."""

__all__ = ["INTERPRETED", "run_backward", "run_forward"]


def run_forward(
    query: Tensor, keys: KeysValues, sinks: Tensor | None, tables: Tables, options: ScoreOptions, tiles: Tiles
) -> AttentionOutput:
    """Return the outputs [1, H, N, D], token-major in memory, and log2-sum-exp2 [H, N], sinks included.

    Args:
        query: [1, H, N, D], its last axis contiguous.
        keys: [1, G, K, D], the last axis contiguous.
        sinks: [H], None for none.
        tables: tables of the layout under the options's window.
        options: scale, window and softcap of the layer.
        tiles: tile sizes of the kernels.
    """
    num_heads, num_queries = query.shape[1:3]
    wide = _wide(query)
    out = token_major(query, query.dtype)
    lse = torch.empty(num_heads, num_queries, dtype=wide, device=query.device)
    work = tables.by_query(tiles.forward)
    _launch("forward", forward_kernel, query)[(num_heads, work.items.shape[0])](
        query, *keys, out, lse, lse if sinks is None else sinks.to(wide) * LOG2_E,
        tables.first, tables.stop, tables.limit, tables.position, work.items, work.visits,
        num_queries, keys.key.shape[2],
        *_strides(query, *keys, out),
        HAS_SINKS=sinks is not None, **_shared(query, keys, tables), **_scores(options), **_tile(tiles.forward),
        **_options("forward", query),
    )  # fmt: skip
    return AttentionOutput(out, lse)


def run_backward(
    grad_out: Tensor,
    query: Tensor,
    keys: KeysValues,
    whole: AttentionOutput,
    delta: Tensor,
    tables: Tables,
    options: ScoreOptions,
    tiles: Tiles,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, KeysValues]:
    """Return gradients of the query [1, H, N, D] in its dtype, and of keys and values [1, G, K, D] in `grad_dtype`."""
    grad_query = token_major(query, query.dtype)
    work = tables.by_query(tiles.query_gradient)
    inputs = (query, *keys, grad_out)
    index = (tables.first, tables.stop, tables.limit, tables.position)
    sizes = (query.shape[2], keys.key.shape[2])
    constants = {**_shared(query, keys, tables), **_scores(options), "SCALE": options.scale}
    _launch("query_gradient", query_gradient_kernel, query)[(query.shape[1], work.items.shape[0])](
        *inputs, grad_query, whole.lse, delta, *index, work.items, work.visits, *sizes,
        *_strides(*inputs, grad_query),
        **constants, **_tile(tiles.query_gradient), **_options("query_gradient", query),
    )  # fmt: skip
    num_key_heads = keys.key.shape[1]
    grads = KeysValues(*(token_major(tensor, grad_dtype) for tensor in keys))
    tile = tiles.key_gradient
    shared = tables.by_key(tile, num_heads=query.shape[1], num_key_heads=num_key_heads)
    slot_shape = (shared.num_slots, num_key_heads, 2, tile.keys, query.shape[3])
    slots = torch.empty(slot_shape, dtype=_wide(query), device=query.device)
    _launch("key_gradient", key_gradient_kernel, query)[(num_key_heads, shared.items.shape[0])](
        *inputs, *grads, slots, whole.lse, delta, *index, shared.items, shared.visits, *sizes,
        *_strides(*inputs, grads.key),
        **constants, **_tile(tile), **_options("key_gradient", query),
    )  # fmt: skip
    if shared.num_slots:
        add_slots_kernel[(num_key_heads, shared.splits.shape[0], tile.keys // SLOT_ROWS)](
            *grads, slots, shared.splits, keys.key.shape[2], *_strides(grads.key),
            ROWS=SLOT_ROWS, KEY_TILE=tile.keys, **_sizes(query),
        )  # fmt: skip
    return grad_query, grads


def run_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return each row's sum of out times its gradient, [H, N], in float32 or wider."""
    num_heads, num_queries = out.shape[1:3]
    delta = torch.empty(num_heads, num_queries, dtype=_wide(out), device=out.device)
    delta_kernel[(num_heads, -(-num_queries // DELTA_ROWS))](
        out, grad_out, delta, num_queries, *_strides(out, grad_out), QUERY_TILE=DELTA_ROWS, **_sizes(out)
    )
    return delta


def _scores(options: ScoreOptions) -> dict[str, float]:
    """Return the constants of scores: FACTOR * products, or FACTOR * tanh(TANH * products / (2 log2 e)); unit log 2."""
    if options.softcap is None:
        return {"FACTOR": options.scale * LOG2_E, "TANH": 0.0}
    return {"FACTOR": options.softcap * LOG2_E, "TANH": 2 * LOG2_E * options.scale / options.softcap}


def _sizes(tensor: Tensor) -> dict[str, Any]:
    wide = tl.float64 if tensor.dtype == torch.float64 else tl.float32
    return {"HEAD_SIZE": tensor.shape[3], "PADDED": padded_size(tensor.shape[3]), "WIDE": wide}


def _shared(query: Tensor, keys: KeysValues, tables: Tables) -> dict[str, Any]:
    groups = query.shape[1] // keys.key.shape[1]
    return {"GROUPS": groups, "HAS_WINDOW": tables.has_window, **_sizes(query)}


def _tile(tile: tuple[int, int]) -> dict[str, int]:
    return {"QUERY_TILE": tile[0], "KEY_TILE": tile[1]}


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[1:3]]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _is_timed() -> bool:
    """Return whether launch options are found by timing; never in deterministic mode."""
    return not (INTERPRETED or torch.are_deterministic_algorithms_enabled())


def _launch(name: str, kernel: Any, query: Tensor) -> Any:
    return _timed(name, kernel, query.shape[3], query.dtype) if _is_timed() else kernel


def _options(name: str, query: Tensor) -> dict[str, int]:
    return {} if _is_timed() else launches(name, query.shape[3], query.dtype)[0]._asdict()


@cache
def _timed(name: str, kernel: Callable[..., Any], head_size: int, dtype: torch.dtype) -> Any:
    """Autotune the kernel: it times its launch options once per tile size, then uses the fastest."""
    configs = [triton.Config({}, **launch._asdict()) for launch in launches(name, head_size, dtype)]
    return triton.autotune(configs=configs, key=["QUERY_TILE", "KEY_TILE"])(kernel)
