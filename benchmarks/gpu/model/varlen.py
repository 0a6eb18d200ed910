"""Stock Hugging Face on packed sequences: varlen flash attention, as a tuned trainer without trees runs it.

FlashAttention-4 or 2 is used where its package is installed, through Hugging Face; else the flash kernels that torch
ships, which take packed sequences too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import import_utils

from treering.types import TokenIds

TORCH_VARLEN = "benchmark_torch_varlen"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """Sequences end to end.

    Attributes:
        ids: int64 [1, T].
        positions: int64 [1, T], from 0 in every sequence.
        bounds: int32 [K + 1], where sequences start and end.
        max_length: tokens of the longest one.
    """

    ids: Tensor
    positions: Tensor
    bounds: Tensor
    max_length: int


def pack_row(sequences: Sequence[TokenIds], device: torch.device) -> PackedRow:
    """Example: [5, 6] and [7] are ids 5, 6, 7 at positions 0, 1, 0 with bounds 0, 2, 3."""
    lengths = [sequence.size for sequence in sequences]
    ids = np.concatenate(sequences).astype(np.int64)[None]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    return PackedRow(
        ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        bounds=torch.from_numpy(bounds).to(device),
        max_length=max(lengths),
    )


def varlen_implementation() -> str:
    """Hugging Face's name of the attention of `hidden_states`: the newest FlashAttention installed, or torch's."""
    AttentionInterface.register(TORCH_VARLEN, _torch_varlen)
    for version in (4, 2):
        if getattr(import_utils, f"is_flash_attn_{version}_available")():
            return f"flash_attention_{version}"
    return TORCH_VARLEN


@contextmanager
def varlen_attention(model: PreTrainedModel) -> Iterator[str]:
    """Lets a model attend within each packed sequence, and restores its attention on exit. Yields its name."""
    previous = model.config._attn_implementation
    model.config._attn_implementation = varlen_implementation()
    try:
        yield model.config._attn_implementation
    finally:
        model.config._attn_implementation = previous


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Last hidden states of a packed row, [T, C]; inside `varlen_attention`, and so is their backward."""
    out = model.get_decoder()(
        input_ids=row.ids,
        position_ids=row.positions,
        cu_seq_lens_q=row.bounds,
        cu_seq_lens_k=row.bounds,
        max_length_q=row.max_length,
        max_length_k=row.max_length,
        use_cache=False,
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _torch_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **host_options: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention signature: [1, heads, T, D] in, [1, T, heads, D] out."""
    if query.device.type == "cpu":
        return _one_by_one(query, key, value, cu_seq_lens_q.tolist(), scaling).transpose(1, 2), None
    rows = [heads[0].transpose(0, 1) for heads in (query, key, value)]
    bounds, longest = cu_seq_lens_q, max_length_q
    # The public varlen_attn takes fewer key heads than query heads only since torch 2.12; the kernel below always did.
    out = torch.ops.aten._flash_attention_forward(
        *rows, bounds, bounds, longest, longest, 0.0, True, False, scale=scaling
    )[0]
    return out[None], None


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float) -> Tensor:
    """The same where there is no varlen kernel: sequence after sequence."""
    parts = [
        scaled_dot_product_attention(
            *(heads[:, :, start:stop] for heads in (query, key, value)), is_causal=True, scale=scale, enable_gqa=True
        )
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(parts, 2)
