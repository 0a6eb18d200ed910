"""The calls of flash-attn-4 and the masks that its compiler builds into the kernels; imported on first use.

Kernels are kept by a hash of the mask, so masks are functions of this module and read all numbers from arrays.

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


@cute.jit
@no_type_check
def on_path(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Whether the row lies in the range of the key."""
    first = utils.scalar_to_ssa(aux_tensors[0][n_idx[0]], cutlass.Int32)
    stop = utils.scalar_to_ssa(aux_tensors[1][n_idx[0]], cutlass.Int32)
    return (m_idx >= first) & (m_idx < stop)


@cute.jit
@no_type_check
def on_path_within_window(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """The same, and whether the row's position is below the limit of the key."""
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
    """Output [1, N, H, D] and log-sum-exp [1, H, N], in which a sink counts; arguments as of `flash_forward`."""
    with torch.no_grad():
        out, lse, *_ = flash_attn_func(
            query, key, value, softmax_scale=scale, softcap=softcap, learnable_sink=sinks, mask_mod=_mask(ranges),
            aux_tensors=list(ranges), block_sparse_tensors=_named(by_query, block_size), pack_gqa=False,
            return_lse=True,
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
    """Gradients of queries, keys, values, and of sinks if there are any, in the layout and dtype of each."""
    gradients: tuple[Tensor, ...] = _flash_attn_bwd(
        query, key, value, out, grad_out, lse, softmax_scale=scale, softcap=softcap, learnable_sink=sinks,
        mask_mod=_mask(ranges), aux_tensors=list(ranges), block_sparse_tensors=_named(by_key, block_size),
    )  # fmt: skip
    return gradients


def _mask(ranges: Sequence[Tensor]) -> Any:
    return on_path if len(ranges) == 2 else on_path_within_window


def _named(lists: Sequence[Tensor], block_size: Sequence[int]) -> Any:
    # Without its name the size of a block is guessed from lengths, which fails on short ends.
    return BlockSparseTensorsTorch(*lists, block_size=tuple(block_size))
