"""Sums gradients over ranks once per step: of weights that stay gathered, and of weights that all ranks hold whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treering.ranks.group import RankGroup
from treering.ranks.units import groups_of


@contextmanager
def gathered(units: Sequence[Any], zero: Callable[[], Tensor]) -> Iterator[None]:
    """Context manager in which weights stay gathered and no pass communicates; gradients are reduced at its end.

    So ranks run any passes in any number. It costs the whole weights and gradients on each.

    Args:
        units: of a model; none does nothing.
        zero: runs one forward that enters every unit once and returns 0; its backward reduces what the block left.
    """
    if not units:
        yield
        return
    groups = list(groups_of(units))
    _begin(units)
    # After lazy initialisation, which gives the root its own way to reshard.
    before = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
    automatic = [unit._get_fsdp_state()._auto_reshard_after_forward for unit in units]
    try:
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()
        yield
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
        total = zero()
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    finally:
        for group, (mesh_info, after_backward) in zip(groups, before, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = mesh_info, after_backward
        for unit, is_automatic in zip(units, automatic, strict=True):
            unit.set_requires_gradient_sync(True, recurse=False)
            unit._get_fsdp_state()._auto_reshard_after_forward = is_automatic
            unit.reshard()


@contextmanager
def summed(weights: Sequence[nn.Parameter], group: RankGroup) -> Iterator[None]:
    """Context manager whose gradients of some weights are summed over ranks at its end, and added to those before.

    A weight without a gradient on every rank keeps none. After an error the gradients are those from before the block.
    """
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    except BaseException:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient
        raise
    has_gradient = group.sum(np.array([weight.grad is not None for weight in weights], np.float64)) > 0
    chosen = [weight for weight, has in zip(weights, has_gradient, strict=True) if has]
    own = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in chosen]
    group.sum_tensors(own)
    for weight, total in zip(chosen, own, strict=True):
        weight.grad = total
    for weight, gradient in zip(weights, before, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else gradient.add_(weight.grad)


def whole_weights(units: Sequence[Any], *modules: nn.Module | None) -> list[nn.Parameter]:
    """The trainable weights of some modules that no unit shards, each once.

    What a forward left gathered is sharded first.
    """
    from torch.distributed.tensor import DTensor

    for unit in units:
        unit.reshard()
    # A value head may be a part of the model, and is then in both.
    weights = dict.fromkeys(weight for module in modules if module is not None for weight in module.parameters())
    return [weight for weight in weights if weight.requires_grad and not isinstance(weight, DTensor)]


def _begin(units: Sequence[Any]) -> None:
    """Lazy initialisation, from the outermost units; the others are theirs then."""
    for unit in units:
        unit._get_fsdp_state()._lazy_init()


def reset(units: Sequence[Any]) -> None:
    """Shards all weights again after an error, and drops the gradients of gathered ones, which `zero_grad` misses."""
    for group in groups_of(units):
        for weight in group.fsdp_params:
            weight.unsharded_accumulated_grad = None
            if hasattr(weight, "_unsharded_param"):
                weight._unsharded_param.grad = None
    for unit in units:
        state = unit._get_fsdp_state()
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
