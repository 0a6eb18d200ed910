"""Emulate flash-attn-4 and its compiler in plain torch, with its lists of blocks and mask functions.

Blocks in neither list are skipped, blocks of the second one have no mask, and rows and keys past the end are zeros that
only the mask can hide. The mask's arrays are indexed for whole blocks, so one that is too short is an IndexError.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad


class BlockSparse(NamedTuple):
    """Stand-in for the package's class, with the fields that the backend names."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


class Lanes:
    """Numbers in a mask function, like the compiler's vectors."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __getitem__(self, lane: int) -> Tensor:
        assert lane == 0
        return self.numbers

    def __ge__(self, other: "Lanes") -> "Lanes":
        return Lanes(self.numbers >= other.numbers)

    def __lt__(self, other: "Lanes") -> "Lanes":
        return Lanes(self.numbers < other.numbers)

    def __and__(self, other: "Lanes") -> "Lanes":
        return Lanes(self.numbers & other.numbers)


class Block(NamedTuple):
    """A listed pair of blocks: its query rows, its keys, and the pairs that its mask allows."""

    rows: slice
    keys: slice
    seen: Tensor


def listed(
    lists: BlockSparse, inputs: "Inputs", mask_mod: Callable[..., Lanes], aux: list[Tensor], *, by_key: bool
) -> Iterator[Block]:
    """Yield the pairs of blocks that a kernel visits, in its order; check the package's limits on list sizes."""
    assert len(lists) == 5
    num_blocks = [side.shape[1] // size for side, size in zip(inputs[:2], lists.block_size, strict=True)]
    num_own, num_other = reversed(num_blocks) if by_key else num_blocks
    assert lists.mask_block_cnt.shape == lists.full_block_cnt.shape == (1, 1, num_own)
    assert max(lists.mask_block_idx.shape[3], lists.full_block_idx.shape[3]) <= num_other
    ways = ((lists.mask_block_cnt, lists.mask_block_idx), (lists.full_block_cnt, lists.full_block_idx))
    for own in range(lists.mask_block_cnt.shape[2]):
        for is_full, (lengths, blocks) in enumerate(ways):
            assert lengths.dtype == blocks.dtype == torch.int32
            for other in blocks[0, 0, own, : lengths[0, 0, own]].tolist():
                row, key = (other, own) if by_key else (own, other)
                height, width = lists.block_size
                rows, keys = slice(row * height, (row + 1) * height), slice(key * width, (key + 1) * width)
                m_idx = torch.arange(rows.start, rows.stop)[:, None].expand(height, width)
                n_idx = torch.arange(keys.start, keys.stop)[None].expand(height, width)
                seen = mask_mod(None, None, Lanes(m_idx), Lanes(n_idx), None, aux).numbers
                yield Block(rows, keys, torch.ones_like(seen) if is_full else seen)


class Inputs(NamedTuple):
    """Queries, keys and values of all query heads, [heads, rows, D], zero-padded to whole blocks."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, size: tuple[int, int]) -> "Inputs":
        groups = query.shape[2] // key.shape[2]
        wide = [tensor[0].double().transpose(0, 1) for tensor in (query, key, value)]
        wide[1:] = [tensor.repeat_interleave(groups, 0) for tensor in wide[1:]]
        return cls(*(padded(tensor, block) for tensor, block in zip(wide, (size[0], size[1], size[1]), strict=True)))

    def scores(self, block: Block, scale: float, softcap: float) -> Tensor:
        scores = self.query[:, block.rows] @ self.key[:, block.keys].mT * scale
        return softcap * torch.tanh(scores / softcap) if softcap else scores


def padded(tensor: Tensor, block: int) -> Tensor:
    return pad(tensor, (0, 0, 0, -tensor.shape[1] % block))


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, softcap: float, learnable_sink: Tensor | None,
    mask_mod: Callable[..., Lanes], aux_tensors: list[Tensor], block_sparse_tensors: BlockSparse, pack_gqa: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not pack_gqa
    assert return_lse
    inputs = Inputs.of(query, key, value, block_sparse_tensors.block_size)
    total, weights = torch.zeros_like(inputs.query), torch.zeros_like(inputs.query[:, :, 0])
    if learnable_sink is not None:
        weights += learnable_sink.double().exp()[:, None]
    for block in listed(block_sparse_tensors, inputs, mask_mod, aux_tensors, by_key=False):
        parts = inputs.scores(block, softmax_scale, softcap).exp() * block.seen
        total[:, block.rows] += parts @ inputs.value[:, block.keys]
        weights[:, block.rows] += parts.sum(-1)
    num_rows = query.shape[1]
    out = (total / weights[..., None])[:, :num_rows].transpose(0, 1)[None]
    lse = weights[None, :, :num_rows].log().contiguous()
    # The package returns float32; float64 is kept for exact comparisons.
    return out.to(query.dtype).contiguous(), lse if query.dtype == torch.float64 else lse.float()


def backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor, *, softmax_scale: float,
    softcap: float, learnable_sink: Tensor | None, mask_mod: Callable[..., Lanes], aux_tensors: list[Tensor],
    block_sparse_tensors: BlockSparse,
) -> tuple[Tensor, ...]:  # fmt: skip
    height = block_sparse_tensors.block_size[0]
    inputs = Inputs.of(query, key, value, block_sparse_tensors.block_size)
    upstream = padded(grad_out[0].double().transpose(0, 1), height)
    delta = padded((grad_out.double() * out.double()).sum(-1)[0].T[..., None], height)
    exponent = padded(lse[0].double()[..., None], height)
    gradients = [torch.zeros_like(tensor) for tensor in inputs]
    for block in listed(block_sparse_tensors, inputs, mask_mod, aux_tensors, by_key=True):
        scores = inputs.scores(block, softmax_scale, softcap)
        weights = (scores - exponent[:, block.rows]).exp() * block.seen
        rows = upstream[:, block.rows]
        per_score = weights * (rows @ inputs.value[:, block.keys].mT - delta[:, block.rows]) * softmax_scale
        if softcap:
            per_score *= 1 - (scores / softcap) ** 2
        gradients[0][:, block.rows] += per_score @ inputs.key[:, block.keys]
        gradients[1][:, block.keys] += per_score.mT @ inputs.query[:, block.rows]
        gradients[2][:, block.keys] += weights.mT @ rows
    taken = []
    for gradient, like in zip(gradients, (query, key, value), strict=True):
        _, count, heads, size = like.shape
        folded = gradient[:, :count].reshape(heads, -1, count, size).sum(1)
        taken.append(torch.empty_like(like).copy_(folded.transpose(0, 1)[None]))
    if learnable_sink is None:
        return tuple(taken)
    num_rows = query.shape[1]
    kept = (learnable_sink.double()[:, None] - lse[0]).exp() * delta[:, :num_rows, 0]
    return (*taken, -kept.sum(1).to(learnable_sink.dtype))


def install(patch: pytest.MonkeyPatch, block_size: tuple[int, int] | None = None) -> None:
    """Make the `flash` backend run on this machine, in blocks of the given size."""
    names = ("cutlass", "flash_attn", "flash_attn.cute", "flash_attn.cute.block_sparsity", "flash_attn.cute.interface")
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    made["cutlass"].Int32 = "Int32"
    made["cutlass"].cute = ModuleType("cutlass.cute")
    made["cutlass"].cute.jit = lambda function: function
    made["flash_attn.cute"].utils = ModuleType("flash_attn.cute.utils")
    made["flash_attn.cute"].utils.scalar_to_ssa = lambda numbers, kind: Lanes(numbers)
    made["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = BlockSparse
    made["flash_attn.cute.interface"].flash_attn_func = forward
    made["flash_attn.cute.interface"]._flash_attn_bwd = backward
    for name, module in made.items():
        patch.setitem(sys.modules, name, module)
    patch.delitem(sys.modules, "treering.attention.flash_kernel", raising=False)
    patch.setattr("treering.attention.flash.check_flash", lambda *arguments: None)
    if block_size is not None:
        patch.setattr("treering.attention.flash.blocks_of", lambda *arguments: block_size)
