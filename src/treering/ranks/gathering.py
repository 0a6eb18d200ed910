"""Sums gradients over ranks once per step: of weights that stay gathered, and of weights that all ranks hold whole."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treering.errors import StateError
from treering.ranks.group import RankGroup, buckets
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


class BucketSums:
    """Sums of gradients over ranks in buckets, from the last weights to the first, as a backward reaches them.

    Every rank sends the same buckets in the same order whatever it runs; weights without a gradient send zeros. While a
    backward runs after `arm`, a bucket is sent once all its weights have their gradients and those behind it are sent.
    """

    def __init__(self, weights: Sequence[nn.Parameter], group: RankGroup) -> None:
        self._group = group
        self._left: list[list[Tensor]] = buckets(weights)
        self._reached: set[Tensor] = set()
        self._sent: list[tuple[list[Tensor], list[Tensor], Callable[[], None]]] = []
        self._hooks: list[Any] = []

    def arm(self) -> None:
        """Send buckets during the next backward, which must be the last, and the next collective of every rank."""
        for weight in itertools.chain(*self._left):
            self._hooks.append(weight.register_post_accumulate_grad_hook(self._reach))  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Send nothing more by itself."""
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Send what is left, wait, and set all gradients; weights that have none on any rank get zeros."""
        while self._left:
            self._send()
        for weights, totals, wait in self._sent:
            wait()
            for weight, total in zip(weights, totals, strict=True):
                weight.grad = total

    def _reach(self, weight: Tensor) -> None:
        if weight in self._reached:
            raise StateError(
                "gradients of ranks are summed once the last backward has reached a weight, and it reached one of "
                f"shape {list(weight.shape)} twice: use gradient_checkpointing=non_reentrant (use_reentrant=False)"
            )
        self._reached.add(weight)
        while self._left and self._reached.issuperset(self._left[-1]):
            self._send()

    def _send(self) -> None:
        weights = self._left.pop()
        own = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        self._sent.append((weights, own, self._group.begin_sum(own)))


@contextmanager
def summed(weights: Sequence[nn.Parameter], group: RankGroup) -> Iterator[Callable[[], None]]:
    """Context manager whose gradients of some weights are summed over ranks at its end, and added to those before.

    A weight without a gradient on every rank keeps none. After an error the gradients are those from before the block.
    Yields a function to call before the last backward of the block, if no collective follows: sums then overlap with
    it. As in DDP, ranks do not go on together after an error in that backward.
    """
    sums = BucketSums(weights, group)
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield sums.arm
    except BaseException:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient
        raise
    finally:
        sums.disarm()
    has_own = np.array([weight.grad is not None for weight in weights], np.float64)
    sums.finish()
    has_gradient = group.sum(has_own) > 0
    for weight, gradient, has in zip(weights, before, has_gradient, strict=True):
        if not has:
            weight.grad = gradient
        elif gradient is not None and weight.grad is not None:
            weight.grad = gradient.add_(weight.grad)


def whole_weights(units: Sequence[Any], *modules: nn.Module | None) -> list[nn.Parameter]:
    """Return the trainable weights of some modules that no unit shards, each once.

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
