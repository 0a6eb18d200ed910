"""Layouts, random inputs and comparisons with the reference, shared by the attention tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treering.attention import Backend, ScoreOptions, TreeLayout, attend
from treering.attention.gateway import Gateway
from treering.attention.layout import Ancestor
from treering.tree.forest import Forest
from treering.tree.partition import Partition, query_ranges, take_fragment

CPU = torch.device("cpu")
Inputs = list[Tensor]


def layout_of(sequences: list[list[int]], device: torch.device = CPU) -> TreeLayout:
    return TreeLayout(Forest.from_sequences(sequences), device)


def random_inputs(
    num_tokens: int,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> Inputs:
    """Return queries, keys and values that require gradients."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, count, num_tokens, size) for count in (heads[0], heads[1], heads[1])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


def results(run: Callable[..., Tensor], inputs: Inputs, sinks: Tensor | None, **options: Any) -> list[Tensor]:
    """Return the output, and the gradients of inputs and sinks if the output requires them."""
    out = run(*inputs, sinks=sinks, **options)
    if not out.requires_grad:
        return [out]
    index = torch.arange(out.numel(), dtype=torch.float64, device=out.device)
    upstream = torch.sin(index).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs if sinks is None else [*inputs, sinks], upstream)]


def assert_close(
    got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12, dtype: torch.dtype = torch.float64
) -> None:
    """Compare tensors; in float64 only the order of sums differs, N terms of a relative 1.1e-16 each."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == dtype
        assert float((mine - theirs).norm()) <= tolerance * max(1.0, float(theirs.norm()))


def in_partitions(
    inputs: Inputs, tree: Forest, partitions: tuple[Partition, ...], backend: Backend, options: ScoreOptions
) -> Tensor:
    """Run a tree's partitions one by one and backward from the last with `loss_of`; return the outputs."""
    layouts: list[TreeLayout] = []
    device = inputs[0].device
    outs: list[tuple[Tensor, Tensor]] = []
    for part in partitions:
        ancestors = []
        above = part.parent
        while above >= 0:
            gateway = layouts[above].gateway
            assert gateway is not None
            ancestors.append(Ancestor.from_ranges(gateway, query_ranges(tree, partitions[above].tokens, part.tokens)))
            above = partitions[above].parent
        layout = TreeLayout(take_fragment(tree, part.tokens), device, ancestors=tuple(ancestors), gateway=Gateway())
        rows = torch.from_numpy(part.tokens.astype(np.int64)).to(device)
        outs.append(
            (attend(*(x[:, :, rows] for x in inputs), layout=layout, options=options, backend=backend, layer=3), rows)
        )
        layouts.append(layout)
    for out, rows in reversed(outs):
        if out.requires_grad:
            loss_of(out, rows).backward()  # type: ignore[no-untyped-call]
    order = torch.cat([rows for _, rows in outs]).argsort()
    return torch.cat([out for out, _ in outs], 2).detach()[:, :, order]


def loss_of(out: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of out * cos(index)."""
    size = out.shape[1] * out.shape[3]
    weights = torch.cos(rows[:, None] * size + torch.arange(size, device=rows.device)).double()
    return (out[0].transpose(0, 1).reshape(-1, size) * weights).sum()


def take_gradients(inputs: Inputs) -> list[Tensor]:
    taken = [x.grad.clone() for x in inputs if x.grad is not None]
    for x in inputs:
        x.grad = None
    return taken


def assert_partitions_equal_the_tree(
    inputs: Inputs,
    tree: Forest,
    partitions: tuple[Partition, ...],
    backend: Backend,
    options: ScoreOptions,
    tolerance: float = 1e-12,
) -> None:
    """Compare outputs and, if inputs require them, gradients with the float64 reference."""
    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    layout = TreeLayout(tree, inputs[0].device)
    wanted = attend(*exact, layout=layout, options=options, backend="reference")
    if wanted.requires_grad:
        loss_of(wanted, torch.arange(tree.num_tokens, device=layout.device)).backward()  # type: ignore[no-untyped-call]
    out = in_partitions(inputs, tree, partitions, backend, options)
    got = [out, *take_gradients(inputs)]
    assert_close(got, [wanted.detach(), *take_gradients(exact)], tolerance, inputs[0].dtype)


def assert_a_token_changes_only_its_descendants(run: Callable[[Inputs], Tensor], layout: TreeLayout) -> None:
    """Change some tokens one at a time and compare bitwise; `run` gets float32 inputs."""
    forest = layout.forest
    inputs = [tensor.detach() for tensor in random_inputs(forest.num_tokens, size=8, dtype=torch.float32)]
    before, index = run(inputs), torch.arange(forest.num_tokens)
    for changed in (1, forest.num_tokens // 2, forest.num_tokens - 1):
        poisoned = [tensor.clone() for tensor in inputs]
        for tensor in poisoned:
            tensor[:, :, changed] += 100.0
        after = run(poisoned)
        descends = (changed <= index) & (index < int(forest.subtree_end[changed]))
        assert torch.equal(after[:, :, ~descends], before[:, :, ~descends])
        assert not torch.equal(after[:, :, descends], before[:, :, descends])
