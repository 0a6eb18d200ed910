"""`prepare` sets up a model once so that gradients are summed over ranks; `ranks_of` finds this setup in a step.

`backward` divides each loss by the denominators of the whole batch, so gradients must be summed. FSDP2 and DDP average
by default, which would divide by the number of ranks again. Other ways to spread a model over processes, which a tree
step would not compute exactly, are refused by name.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.ranks.group import RankGroup, is_running, num_ranks
from treering.ranks.units import groups_of, units_of

RanksMode = Literal["sharded", "gathered"]
"""sharded: weights are gathered in every pass, and all ranks run the same passes. gathered: weights stay gathered
during a step, ranks run any passes, and gradients are reduced once at its end."""

RanksOption = Literal["sharded", "gathered", "alone"]
"""A `RanksMode`, or alone: this rank trains by itself, and nothing is summed."""

_PREPARED = "_treering_ranks"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRanks:
    """Ranks of one step.

    Attributes:
        rank_group: the ranks.
        mode: how they keep step; None if one rank trains by itself.
    """

    rank_group: RankGroup
    mode: RanksMode | None


def prepare(model: nn.Module, mesh: Any = None) -> RankGroup:
    """Set a model up for `treering.backward` on several ranks; call it once, after `fully_shard` or DDP.

    FSDP2's reductions become sums. For DDP and for a model that every rank holds whole, `backward` sums the gradients
    itself, once per step. In a single process without torch.distributed this does nothing, so scripts run there too.

    Args:
        model: sharded by `fully_shard`, wrapped by DDP (or its `.module`), or whole and equal on all ranks.
        mesh: the data-parallel `DeviceMesh`, with one dimension or with all processes (HSDP); None for all processes.

    Returns:
        The group of ranks: its size, this process's rank, and sums.

    Raises:
        UnsupportedError: tensor or context parallelism, FSDP1 or DeepSpeed.
        ConfigError: a mesh other than the one over which the model is sharded.

    Example:
        >>> rank_group = prepare(model)                                      # doctest: +SKIP
        >>> shares = share_among_ranks(forests, rank_group.size)             # doctest: +SKIP
        >>> own = [forests[i] for i in shares[rank_group.rank].forests]      # doctest: +SKIP
        >>> backward(model, own, sft())                                      # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"prepare needs a model, got {type(model).__name__}; pass what fully_shard or DDP returned")
    if not is_running():
        rank_group = RankGroup()
    else:
        units = units_of(model)
        check_parallel(model, units)
        rank_group = _group_of(mesh, model)
        _check_mesh(units, rank_group)
        for unit in units:
            unit.set_gradient_divide_factor(1.0)
            # Sum by the plain operation: gloo has no other, and with a factor of 1 there is nothing to multiply by.
            unit.set_force_sum_reduction_for_comms(True)
    for module in _with_wrapped(model):
        module.__dict__[_PREPARED] = rank_group
    return rank_group


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, whose own reduction is not used, or any other model unchanged."""
    if is_running() and isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def ranks_of(model: nn.Module, requested: RanksOption | None) -> StepRanks:
    """Return the ranks that train a model in a step.

    Args:
        model: the model passed to `prepare`, or the module inside DDP.
        requested: the caller's choice; None means "sharded" if there are units, else "gathered".

    Raises:
        UnsupportedError: see `prepare`.
        StateError: several ranks run, and the model was not prepared, or no longer sums gradients.
        ConfigError: an option that contradicts the model.
    """
    if requested is not None and requested not in get_args(RanksOption):
        raise ConfigError(f"ranks must be one of {', '.join(get_args(RanksOption))}, got {requested!r}")
    units = units_of(model)
    check_parallel(model, units)
    rank_group: RankGroup | None = model.__dict__.get(_PREPARED)
    if not is_running() or (num_ranks() == 1 and not units):
        return StepRanks(rank_group=RankGroup(), mode=None)
    if not units and requested == "alone":
        return StepRanks(rank_group=RankGroup(), mode=None)
    if rank_group is None or rank_group.size == 1 < num_ranks():
        raise StateError(
            f"{num_ranks()} ranks run here, and nothing sums the gradients of this {type(model).__name__}; call "
            "treering.ranks.prepare(model) once, after init_process_group and after wrapping it; on a whole model "
            'ranks="alone" trains this rank by itself'
        )
    if requested == "alone":
        raise ConfigError(
            'a model of fully_shard is trained by all ranks together; use ranks="sharded" or ranks="gathered"'
        )
    _check_sums(units)
    if requested == "sharded" and not units:
        raise ConfigError(
            'ranks="sharded" needs weights sharded by fully_shard, and every rank holds this model whole; use '
            'ranks="gathered"'
        )
    return StepRanks(rank_group=rank_group, mode=requested or ("sharded" if units else "gathered"))


def _check_sums(units: Sequence[Any]) -> None:
    for unit in groups_of(units):
        if unit.gradient_divide_factor != 1.0:
            raise StateError(
                "gradients of ranks must be summed, and a unit divides them by "
                f"{unit.gradient_divide_factor or 'the number of ranks'}; "
                "call treering.ranks.prepare(model) after the last fully_shard, and do not call "
                "set_gradient_divide_factor"
            )


def _group_of(mesh: Any, model: nn.Module) -> RankGroup:
    if mesh is None and isinstance(model, nn.parallel.DistributedDataParallel):
        own = model.process_group
        return RankGroup(rank=own.rank(), size=own.size(), process_group=own)
    if mesh is None or mesh.size() == dist.get_world_size():
        return RankGroup(rank=dist.get_rank(), size=dist.get_world_size())
    if mesh.ndim != 1:
        raise UnsupportedError(
            f"the data-parallel mesh must have one dimension or all processes, got {mesh.ndim} dimensions and "
            f"{mesh.size()} of {dist.get_world_size()} processes; pass the mesh of the data-parallel dimension"
        )
    return RankGroup(rank=mesh.get_local_rank(), size=mesh.size(), process_group=mesh.get_group())


def _check_mesh(units: Sequence[Any], rank_group: RankGroup) -> None:
    for unit in groups_of(units):
        size = unit.mesh_info.mesh.size()
        if size != rank_group.size:
            raise ConfigError(
                f"fully_shard spread the model over {size} processes, and the data-parallel ranks are "
                f"{rank_group.size}; pass the mesh that fully_shard got to prepare"
            )


def _with_wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, and those inside DDP and torch.compile, any of which `backward` may get."""
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        is_ddp = isinstance(inner, nn.parallel.DistributedDataParallel)
        inner = inner._modules.get("module" if is_ddp else "_orig_mod")


_USE = "use torch's fully_shard (FSDP2) with treering.ranks.prepare"
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def check_parallel(model: nn.Module, units: Sequence[Any], *, calls_modules: bool = False) -> None:
    """Refuse tensor and context parallelism, FSDP1 and DeepSpeed.

    Args:
        model: the model with all its wrappers.
        units: its units of `fully_shard`.
        calls_modules: whether every weight is used in the call of its own module, whose hooks gather it under ZeRO-3.

    Raises:
        UnsupportedError: names what was found, and what to use.
    """
    if not is_running():
        return
    _check_wrappers(model)
    if not calls_modules:
        _check_gathered(model)
    _check_tensor_parallel(model, units)
    replaced = getattr(sys.modules.get(_CONTEXT_PARALLEL), "_replaced_functions", {})
    if F.scaled_dot_product_attention in replaced:
        raise UnsupportedError(
            "context parallelism cuts sequences across ranks, and a forest's tokens attend across the cuts; disable "
            f"context_parallel, set max_tokens for partitions, and {_USE}"
        )


def is_of_deepspeed(made: Any) -> bool:
    """Return whether DeepSpeed's code defines a class or a function."""
    return str(getattr(made, "__module__", "")).partition(".")[0] == "deepspeed"


def _check_wrappers(model: nn.Module) -> None:
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in names:
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) flattens weights of several layers, so parts cannot be called alone; "
                f"{_USE}"
            )
        if is_of_deepspeed(type(module)):
            raise UnsupportedError(f"DeepSpeed's {type(module).__name__} reduces gradients in its own backward; {_USE}")


def _check_gathered(model: nn.Module) -> None:
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        raise UnsupportedError(
            f"DeepSpeed ZeRO-3 has partitioned the weights, and gathers them only when the model itself is called; use "
            f"treering.patch(model), under which a trainer calls it, or {_USE}"
        )


def _check_tensor_parallel(model: nn.Module, units: Sequence[Any]) -> None:
    from torch.distributed.tensor import DTensor

    sharded = [weight for group in groups_of(units) for weight in group.fsdp_params]
    own = {id(weight.sharded_param) for weight in sharded}
    is_cut = any(getattr(weight, "is_dtensor", False) for weight in sharded) or any(
        isinstance(weight, DTensor) and id(weight) not in own for weight in model.parameters()
    )
    if is_cut or any((getattr(module, "_tp_size", None) or 1) > 1 for module in model.modules()):
        raise UnsupportedError(
            "tensor parallelism cuts weights inside layers, and several micro-batches are not exact with it (nor in "
            f"stock models); {_USE}"
        )
