"""The call of FlashAttention-4, and the masks that its kernels compile; imported on first use, where it is installed.

Kernels are keyed by the mask functions, which must therefore be functions of this module and never made anew.
"""

from typing import no_type_check

import cutlass
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func
from torch import Tensor

from treering.attention.flash.tables import FlashTables
from treering.attention.form import Form


@cute.jit
@no_type_check
def on_path(batch, head, row, key, seqlen_info, aux_tensors):
    """Whether a row sees a key: `first[key] <= row < stop[key]`."""
    first = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
    stop = utils.scalar_to_ssa(aux_tensors[1][key[0]], cutlass.Int32)
    return (row >= first) & (row < stop)


@cute.jit
@no_type_check
def on_path_within_window(batch, head, row, key, seqlen_info, aux_tensors):
    """The same under a window, which is one more limit per key: `position[row] < limit[key]`."""
    first = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
    stop = utils.scalar_to_ssa(aux_tensors[1][key[0]], cutlass.Int32)
    limit = utils.scalar_to_ssa(aux_tensors[2][key[0]], cutlass.Int32)
    position = utils.scalar_to_ssa(aux_tensors[3][row[0]], cutlass.Int32)
    return (row >= first) & (row < stop) & (position < limit)


def run_flash(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, tables: FlashTables, form: Form
) -> Tensor:
    """Attention [1, H, N, D] of queries over keys and values [1, G, K, D]; differentiable.

    Args:
        query: [1, H, N, D].
        key: [1, G, K, D], ancestors' and own.
        value: the same.
        sinks: [H], None for none.
        tables: which blocks are visited, and what the mask reads.
        form: scale and softcap; its window is in the tables.
    """
    forward, backward = (
        BlockSparseTensorsTorch(*lists.masked, *lists.full, block_size=tables.block_size)
        for lists in (tables.by_query, tables.by_key)
    )
    out, _ = flash_attn_func(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        softmax_scale=form.scale,
        softcap=form.softcap or 0.0,
        learnable_sink=sinks,
        pack_gqa=False,
        mask_mod=on_path if len(tables.ranges) == 2 else on_path_within_window,
        aux_tensors=list(tables.ranges),
        block_sparse_tensors=forward,
        block_sparse_tensors_bwd=backward,
    )
    attended: Tensor = out.transpose(1, 2)
    return attended
