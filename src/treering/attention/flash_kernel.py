"""Calls of flash-attn-4, and the masks that its compiler builds into the kernels; imported on first use.

The package caches kernels by a hash of the mask, so masks are functions of this module and read all numbers from
arrays.

    N query rows   K keys   H query heads   G key heads   D head size
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import cutlass
import torch
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, flash_attn_func
from torch import Tensor


@no_type_check
@cute.jit
def on_path(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Return whether the row is in the key's range."""
    first = utils.scalar_to_ssa(aux_tensors[0][n_idx[0]], cutlass.Int32)
    stop = utils.scalar_to_ssa(aux_tensors[1][n_idx[0]], cutlass.Int32)
    return (m_idx >= first) & (m_idx < stop)


@no_type_check
@cute.jit
def on_path_within_window(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Return whether the row is in the key's range and its position is below the key's limit."""
    first = utils.scalar_to_ssa(aux_tensors[0][n_idx[0]], cutlass.Int32)
    stop = utils.scalar_to_ssa(aux_tensors[1][n_idx[0]], cutlass.Int32)
    limit = utils.scalar_to_ssa(aux_tensors[2][n_idx[0]], cutlass.Int32)
    position = utils.scalar_to_ssa(aux_tensors[3][m_idx[0]], cutlass.Int32)
    return (m_idx >= first) & (m_idx < stop) & (position < limit)


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    ranges: Sequence[Tensor],
    by_query: Sequence[Tensor],
    by_key: Sequence[Tensor],
    block_size: Sequence[int],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return output [1, N, H, D] and log-sum-exp [1, H, N], sinks included; arguments as in `flash_forward`."""
    with torch.no_grad():
        out, lse, *_ = flash_attn_func(
            query, key, value, softmax_scale=scale, softcap=softcap, learnable_sink=sinks, mask_mod=_mask(ranges),
            aux_tensors=list(ranges), block_sparse_tensors=_named(by_query, query, key, block_size),
            pack_gqa=False, return_lse=True,
        )  # fmt: skip
    return out, lse


def run_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    ranges: Sequence[Tensor],
    by_query: Sequence[Tensor],
    by_key: Sequence[Tensor],
    block_size: Sequence[int],
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values, and sinks if given, in the layout and dtype of each."""
    gradients: tuple[Tensor, ...] = _flash_attn_bwd(
        query, key, value, out, grad_out, lse, softmax_scale=scale, softcap=softcap, learnable_sink=sinks,
        mask_mod=_mask(ranges), aux_tensors=list(ranges),
        block_sparse_tensors=_named(by_key, query, key, block_size, by_key=True),
    )  # fmt: skip
    return gradients


def _mask(ranges: Sequence[Tensor]) -> Any:
    return on_path if len(ranges) == 2 else on_path_within_window


def _named(
    lists: Sequence[Tensor], query: Tensor, key: Tensor, block_size: Sequence[int], *, by_key: bool = False
) -> Any:
    """Name the lists of one side, without the padding of `BlockPairs.lists`, which the package refuses."""
    num_blocks = [-(-rows.shape[1] // size) for rows, size in zip((query, key), block_size, strict=True)]
    own, other = reversed(num_blocks) if by_key else num_blocks
    cut = [_cut(_cut(tensor, 2, own), 3, other) if tensor.dim() == 4 else _cut(tensor, 2, own) for tensor in lists]
    # Without block_size the package guesses it from lengths, which fails on short last blocks.
    return BlockSparseTensorsTorch(*cut, block_size=tuple(block_size))


def _cut(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor if tensor.shape[dim] <= size else tensor.narrow(dim, 0, size).contiguous()
