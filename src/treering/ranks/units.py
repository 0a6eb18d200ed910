"""The units of a model wrapped by `fully_shard`: what a unit is, how it reduces, and how a call enters it.

A unit gathers its weights when it is called, and shards them again afterwards. The tree step calls a decoder and a
head, not the model around them. So each call enters the units around these, from the outermost to the innermost,
through torch's own `register_fsdp_forward_method`.

    N tokens   C hidden size
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from treering.errors import UnsupportedError
from treering.ranks.group import is_running

_ENTRY = "_treering_enter"


def units_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the units of a model, outer ones before those inside; none without torch.distributed."""
    if not is_running():
        return ()
    from torch.distributed.fsdp import FSDPModule

    return tuple(module for module in model.modules() if isinstance(module, FSDPModule))


def groups_of(units: Sequence[Any]) -> Iterator[Any]:
    """Yield torch's parameter groups of some units, each once."""
    seen: set[int] = set()
    for unit in units:
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


@contextmanager
def reducing(units: Sequence[Any]) -> Iterator[None]:
    """Make every backward inside the context reduce its gradients, even if a caller defers it between micro-batches."""
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups_of(units)]
    for group, *_ in before:
        group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    finally:
        for group, scatters, sums in before:
            group.reduce_grads, group.all_reduce_grads = scatters, sums


def own_hooks(module: nn.Module) -> set[int]:
    """Return the ids of the forward hooks that make a module a unit; empty for any other module."""
    if not is_unit(module):
        return set()
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    found: set[int] = set()
    for handle in handles:
        # The hooks of a unit of several modules share one handle.
        inner = getattr(handle, "handles", (handle,))
        found |= {one.id for one in inner}
    return found


def is_unit(module: nn.Module) -> bool:
    """Return whether a module is itself a unit."""
    if not is_running():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def path_to(module: nn.Module, units: Sequence[Any], *, with_itself: bool) -> tuple[Any, ...]:
    """Return the units that hold a module, outermost first."""
    return tuple(
        unit
        for unit in units
        if (unit is module and with_itself) or (unit is not module and any(inner is module for inner in unit.modules()))
    )


def enter(path: Sequence[Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `run` with the weights of some units gathered, outermost first.

    Args:
        path: the units.
        run: returns a tensor or a tuple of tensors and None, in which a unit finds the gradients that come back.
        args: arguments of `run`; a unit finds the way out for gradients in the tensors among them.
        kwargs: keyword arguments of `run`.
    """
    for unit in reversed(path):
        run = partial(_entry_of(unit), run)
    return run(*args, **kwargs)


def without_hooks(unit: nn.Module) -> nn.Module:
    """Return a unit's module as it was before sharding, on the same parameters, which follow the unit's.

    Inside `enter` it can be called repeatedly, whereas each call of the unit would gather its weights again.
    """
    # A unit's class consists of torch's mixin and the module's own class, in this order.
    own_class: Any = type(unit).__mro__[2]
    plain: nn.Module = object.__new__(own_class)
    plain.__dict__.update(unit.__dict__)
    own = own_hooks(unit)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(unit, name)
        plain.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in own)
    return plain


def param_dtype(units: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype that the innermost unit computes in, if its policy sets one."""
    dtypes = [unit._get_fsdp_state()._mp_policy.param_dtype for unit in units]
    return dtypes[-1] if dtypes else None


def _entry_of(unit: Any) -> Callable[..., Any]:
    if _ENTRY not in unit.__dict__:
        from torch.distributed.fsdp import register_fsdp_forward_method

        unit.__dict__[_ENTRY] = MethodType(_enter, unit)
        register_fsdp_forward_method(unit, _ENTRY)
    entry: Callable[..., Any] = unit.__dict__[_ENTRY]
    return entry


def _enter(unit: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shards:
    """Units around the parts of a sharded model.

    Attributes:
        units: all of them, outer ones before those inside.
        run: calls the decoder, compiled if the model was.
        decoder_path: units around the decoder, outermost first.
        head_path: units around the head, and the head if it is a unit.
        head: the head, without the hooks of a unit.
        device: device to which weights are gathered.
        dtype: dtype in which layers compute, if the policy sets it.
    """

    units: tuple[Any, ...]
    run: Callable[..., Any]
    decoder_path: tuple[Any, ...]
    head_path: tuple[Any, ...]
    head: nn.Module
    device: torch.device
    dtype: torch.dtype | None

    def run_decoder(self, **arguments: Any) -> Any:
        """Call the decoder inside the units around it."""
        return enter(self.decoder_path, self.run, **arguments)

    def on_head(self, run: Callable[[nn.Module, Tensor], Any], hidden: Float[Tensor, "N C"]) -> Any:
        """Return `run(head, hidden)` with the head's weights gathered once, however often `run` calls the head.

        `run` must return a tensor, or a tuple of tensors and None.
        """
        head = self.head
        return enter(self.head_path, lambda rows: run(head, rows), hidden)

    def release(self) -> None:
        """Release weights that a forward has gathered and no backward will; the outermost unit keeps its own."""
        for unit in self.units:
            unit.reshard()

    def zero(self, hidden: Float[Tensor, "N C"]) -> Float[Tensor, ""]:
        """Return 0 with gradients of 0 for all weights, head included, so that ranks without scores reduce them too."""
        # Scaled inside, because a unit warns of views that it returns.
        of_head: Tensor = self.on_head(lambda head, rows: 0.0 * head(rows[:1])[0, 0], hidden)
        return of_head + 0.0 * hidden[0, 0]

    def zero_in_one_entry(self, hidden_of: Callable[[Callable[..., Any]], Tensor]) -> Tensor:
        """Return `zero` of one forward that enters each unit once: its backward reduces what earlier passes left.

        Args:
            hidden_of: returns hidden states [N, C] of some tokens, given a function that calls the decoder.
        """
        common = tuple(unit for unit in self.decoder_path if any(unit is other for other in self.head_path))
        inner_decoder, inner_head = (path[len(common) :] for path in (self.decoder_path, self.head_path))

        def forward() -> Tensor:
            hidden = hidden_of(partial(enter, inner_decoder, self.run))
            logits: Tensor = enter(inner_head, self.head, hidden[:1])
            return 0.0 * hidden[0, 0] + 0.0 * logits[0, 0]

        total: Tensor = enter(common, forward)
        return total


def find_shards(model: nn.Module, *, decoder: nn.Module, head: nn.Module, run: Callable[..., Any]) -> Shards | None:
    """Return the units around a model's parts; None for a model that is not sharded.

    Args:
        model: the model with its wrappers.
        decoder: decoder of the model.
        head: head of the model.
        run: calls the decoder.

    Raises:
        UnsupportedError: a unit inside the head.
    """
    units = units_of(model)
    if not units:
        return None
    inside = [unit for unit in units if unit is not head and any(unit is module for module in head.modules())]
    if inside:
        raise UnsupportedError(
            f"a head must be gathered once per forward, and {type(inside[0]).__name__} inside it is sharded "
            "separately; shard the head itself, or leave it to the unit around it"
        )
    return Shards(
        units=units,
        run=run,
        decoder_path=path_to(decoder, units, with_itself=False),
        head_path=path_to(head, units, with_itself=True),
        head=without_hooks(head) if is_unit(head) else head,
        # Where units compute, to which offloaded weights are moved.
        device=units[0]._get_fsdp_state()._device,
        dtype=param_dtype(units),
    )
