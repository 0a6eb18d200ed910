"""Refuses by name the ways to spread a model over processes that a tree step would not compute exactly."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F

from treering.errors import UnsupportedError
from treering.ranks.group import is_running
from treering.ranks.units import groups_of

_USE = "use torch's fully_shard (FSDP2) with treering.ranks.prepare"
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def check_parallel(model: nn.Module, units: Sequence[Any], *, calls_modules: bool = False) -> None:
    """Refuses tensor and context parallelism, FSDP1 and DeepSpeed.

    Args:
        model: with all its wrappers.
        units: its units of `fully_shard`.
        calls_modules: every weight is used in the call of its own module, whose hooks gather it under ZeRO-3.

    Raises:
        UnsupportedError: names what it is, and what to use.
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
            "context parallelism cuts sequences across ranks, and a forest's tokens see tokens anywhere: leave "
            f"context_parallel, set max_tokens for partitions, and {_USE}"
        )


def is_of_deepspeed(made: Any) -> bool:
    """Whether DeepSpeed's code defines a class or a function."""
    return str(getattr(made, "__module__", "")).partition(".")[0] == "deepspeed"


def _check_wrappers(model: nn.Module) -> None:
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in names:
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) flattens weights of several layers, so parts cannot be called alone: "
                f"{_USE}"
            )
        if is_of_deepspeed(type(module)):
            raise UnsupportedError(f"DeepSpeed's {type(module).__name__} reduces gradients in its own backward: {_USE}")


def _check_gathered(model: nn.Module) -> None:
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        raise UnsupportedError(
            f"DeepSpeed ZeRO-3 has partitioned the weights, and gathers them where the model itself is called, as "
            f"treering.patch(model) leaves it to a trainer: do that, or {_USE}"
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
            "tensor parallelism cuts weights inside layers, and several micro-batches are not exact with it (in stock "
            f"models neither): {_USE}"
        )
