"""Sum gradients over ranks once per step: of weights that stay gathered, and of weights that every rank holds whole."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treering.errors import StateError, UnsupportedError
from treering.ranks.group import RankGroup, buckets
from treering.ranks.setup import StepRanks
from treering.ranks.units import Shards, groups_of, units_of


@contextmanager
def reduced_over_ranks(
    team: StepRanks,
    model: nn.Module,
    shards: Shards | None,
    value_head: nn.Module | None,
    run_filler: Callable[[Callable[..., Any]], Tensor],
) -> Iterator[Callable[[], None]]:
    """Reduce gradients over ranks after the passes of a step, which run inside this context and `tree_attention`.

    Sharded weights are reduced by their units: in every pass, or at the end. Weights that every rank holds whole, such
    as those of a value head or of a model inside DDP, are summed at the end.

    Yield a function to call before the last backward. Whole weights are then summed while that backward runs, so no
    rank may sum anything else until the block ends.

    Args:
        team: ranks of the step.
        model: the model with all its weights.
        shards: its units; None if every rank holds it whole.
        value_head: head with weights of its own; None without one.
        run_filler: runs one small forward with a given decoder, and returns its hidden states.

    Raises:
        UnsupportedError: a sharded value head.
    """
    if value_head is not None and units_of(value_head):
        raise UnsupportedError(
            "a value head must be whole on every rank, and fully_shard has sharded this one; exclude it from "
            "fully_shard, and backward sums its gradients"
        )
    units = () if shards is None else shards.units

    def zero() -> Tensor:
        assert shards is not None
        return shards.zero_in_one_entry(run_filler)

    weights = whole_weights(units, model, value_head)
    try:
        with (
            summed(weights, team.rank_group) as before_last,
            gathered(units if team.mode == "gathered" else (), zero),
        ):
            # Sharded units communicate during the backward, where the sums of whole weights would mix with theirs.
            yield (lambda: None) if units else before_last
    except BaseException:
        reset(units)
        raise


@contextmanager
def gathered(units: Sequence[Any], zero: Callable[[], Tensor]) -> Iterator[None]:
    """Keep weights gathered inside the context, so that no pass communicates; reduce gradients at its end.

    So ranks may run different passes, and different numbers of them. Each rank holds the whole weights and gradients.

    Args:
        units: units of a model; without any, nothing happens.
        zero: runs one forward that enters every unit once and returns 0; its backward reduces what the block left.
    """
    if not units:
        yield
        return
    groups = list(groups_of(units))
    # From the outermost, which must own the others.
    for unit in units:
        unit._get_fsdp_state()._lazy_init()
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

    Every rank sends the same buckets in the same order, whatever it runs; weights without a gradient send zeros. During
    a backward after `arm`, a bucket is sent once all its weights have their gradients and the buckets behind it are
    sent.
    """

    def __init__(self, weights: Sequence[nn.Parameter], rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._left: list[list[Tensor]] = buckets(weights)
        self._reached: set[Tensor] = set()
        self._sent: list[tuple[list[Tensor], list[Tensor], Callable[[], None]]] = []
        self.hooks: list[Any] = []

    def arm(self) -> None:
        """Send buckets during the next backward, which must be the last, and the next collective of every rank."""
        for weight in itertools.chain(*self._left):
            self.hooks.append(weight.register_post_accumulate_grad_hook(self._reach))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Send the remaining buckets, wait, and set all gradients; weights without any on all ranks get zeros."""
        while self._left:
            self._send()
        for weights, totals, wait in self._sent:
            wait()
            for weight, total in zip(weights, totals, strict=True):
                weight.grad = total

    def _reach(self, weight: Tensor) -> None:
        if weight in self._reached:
            raise StateError(
                "a weight must get its gradient once in the last backward, while ranks sum gradients, and one of shape "
                f"{list(weight.shape)} got it twice; set gradient_checkpointing=non_reentrant (use_reentrant=False)"
            )
        self._reached.add(weight)
        while self._left and self._reached.issuperset(self._left[-1]):
            self._send()

    def _send(self) -> None:
        weights = self._left.pop()
        own = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        self._sent.append((weights, own, self._rank_group.begin_sum(own)))


@contextmanager
def summed(weights: Sequence[nn.Parameter], rank_group: RankGroup) -> Iterator[Callable[[], None]]:
    """Sum the gradients of some weights over ranks at the end of the context, and add them to earlier gradients.

    A weight without a gradient on any rank keeps none. An error restores the gradients from before the block. Yields a
    function to call before the last backward of the block, if no collective follows: sums then overlap with it. As in
    DDP, ranks cannot continue together after an error in that backward.
    """
    sums = BucketSums(weights, rank_group)
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
        for hook in sums.hooks:
            hook.remove()
    has_own = np.array([weight.grad is not None for weight in weights], np.float64)
    sums.finish()
    has_gradient = rank_group.sum(has_own) > 0
    for weight, gradient, has in zip(weights, before, has_gradient, strict=True):
        if not has:
            weight.grad = gradient
        elif gradient is not None and weight.grad is not None:
            weight.grad = gradient.add_(weight.grad)


def whole_weights(units: Sequence[Any], *modules: nn.Module | None) -> list[nn.Parameter]:
    """Return the trainable weights of some modules that no unit shards, each once.

    Weights that a forward left gathered are sharded first.
    """
    from torch.distributed.tensor import DTensor

    for unit in units:
        unit.reshard()
    # A value head may be a part of the model, and is then in both.
    weights = dict.fromkeys(weight for module in modules if module is not None for weight in module.parameters())
    return [weight for weight in weights if weight.requires_grad and not isinstance(weight, DTensor)]


def reset(units: Sequence[Any]) -> None:
    """Shard all weights again after an error, and drop the gradients of gathered ones, which `zero_grad` misses."""
    for group in groups_of(units):
        for weight in group.fsdp_params:
            weight.unsharded_accumulated_grad = None
            if hasattr(weight, "_unsharded_param"):
                weight._unsharded_param.grad = None
    for unit in units:
        state = unit._get_fsdp_state()
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
