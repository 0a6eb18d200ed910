"""Run a recurrent layer along a forest: patch its `forward` to make the calls of a plan.

The layer itself stays Hugging Face's: it is called on rows of tokens with our cache, as generation calls it to continue
several texts.

    N tokens   C hidden size   R boundary tokens
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treering.attention import TreeLayout
from treering.attention.states import Boundary, StateGateway, States
from treering.attention.to_device import to_device
from treering.errors import StateError
from treering.model.recurrence.cache import CallCache
from treering.model.recurrence.padding import closed_gates, gates_of
from treering.model.recurrence.plan import RowCall, plan_of

Mixer = Callable[..., Tensor]


@contextmanager
def routed(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which mixers follow the forest that is passed as `attention_mask`; restores them on exit.

    Example:
        >>> with routed([layer.linear_attn for layer in layers]):          # doctest: +SKIP
        ...     out = decoder(..., attention_mask=layout)
    """
    with ExitStack() as undo:
        for mixer in mixers:
            own = mixer.__dict__.get("forward")
            if isinstance(own, _Routed):
                continue
            gates_of(mixer)
            mixer.__dict__["forward"] = _Routed(_forward, mixer, mixer.forward)
            undo.callback(_restore, mixer, own)
        yield


class _Routed(partial[Tensor]):
    """A patched forward of a mixer; the type prevents patching twice when a layer is recomputed inside the block."""


def _restore(mixer: nn.Module, own: object) -> None:
    if own is None:
        del mixer.__dict__["forward"]
    else:
        mixer.__dict__["forward"] = own


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(
    mixer: nn.Module,
    original: Mixer,
    hidden_states: Float[Tensor, "1 N C"],
    cache: object = None,
    cache_params: object = None,
    attention_mask: object = None,
    **options: Any,
) -> Float[Tensor, "1 N C"]:
    """A mixer's forward on a forest: [1, N, C] in packed order in and out."""
    if not isinstance(attention_mask, TreeLayout):
        raise StateError("a recurrent layer was called inside tree_attention without a forest: use treering.forward")
    layer: Any = mixer.layer_idx
    return run_on_forest(partial(original, **options), mixer, hidden_states[0], layout=attention_mask, layer=layer)[
        None
    ]


def run_on_forest(
    original: Mixer, mixer: nn.Module, hidden: Float[Tensor, "N C"], *, layout: TreeLayout, layer: int
) -> Float[Tensor, "N C"]:
    """The mixer's output for every token given its own path; exchanges states at the forest's boundary."""
    plan, boundary = plan_of(layout), layout.boundary
    gateway = None if boundary is None else boundary.gateway
    above = None if boundary is None else _received(boundary, layer, layout.device)
    name = _name_of_cache(mixer)
    outputs: list[Tensor] = []
    kept: list[States] = []
    for level in plan.levels:
        ends: list[States] = []
        for call in level:
            cache = CallCache(_started(above, call))
            with closed_gates(mixer, call.padding):
                rows = hidden.index_select(0, call.tokens.reshape(-1)).reshape(*call.tokens.shape, -1)
                out = original(hidden_states=rows, attention_mask=None, **{name: cache})
            outputs.append(out.reshape(-1, out.shape[-1]))
            if call.kept.numel():
                ends.append(cache.ends(call.kept, call.length))
        if gateway is not None:
            kept += ends
        above = _joined(ends) if ends else None
    result = torch.cat(outputs).index_select(0, plan.source)
    if gateway is None:
        return result
    return _export_states(result, States(*(part.index_select(0, plan.left) for part in _joined(kept))), gateway, layer)


def _name_of_cache(mixer: nn.Module) -> str:
    """The argument of a mixer's cache: transformers 5.24 drops one that comes by the name of before."""
    return "cache" if "cache" in inspect.signature(type(mixer).forward).parameters else "cache_params"


def _joined(states: list[States]) -> States:
    if len(states) == 1:
        return states[0]
    return States(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def _started(above: States | None, call: RowCall) -> States | None:
    """The initial state of each row of a call; None if all rows start at the top of a tree."""
    return None if above is None else States(*(part.index_select(0, call.start) for part in above))


def _received(boundary: Boundary, layer: int, device: torch.device) -> States | None:
    """The states that a partition starts from, as leaves whose gradients are added to the gateway above."""
    if boundary.above is None or boundary.slots.size == 0:
        return None
    gateway, slots = boundary.above, to_device(boundary.slots, device)
    states = States(*(part.index_select(0, slots) for part in gateway.read(layer)))
    if torch.is_grad_enabled():
        for name, part in zip(States._fields, states, strict=True):
            part.requires_grad_(True).register_hook(  # type: ignore[no-untyped-call]
                partial(gateway.add_gradient, layer, name, slots)
            )
    return states


class _ExportStates(torch.autograd.Function):
    """A layer's output unchanged; its backward adds the state gradients that partitions below have left in the gateway.

    It is attached to the output, which always gets a gradient; a state that only other partitions read gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, recurrent: Tensor, context: Tensor, gateway: StateGateway, layer: int
    ) -> Tensor:
        ctx.gateway, ctx.layer, ctx.dtypes = gateway, layer, (recurrent.dtype, context.dtype)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        below = ctx.gateway.take_gradient(ctx.layer)
        if below is None:
            return (*grads, None, None, None, None)
        recurrent, context = (part.to(dtype) for part, dtype in zip(below, ctx.dtypes, strict=True))
        return (*grads, recurrent, context, None, None)


def _export_states(output: Tensor, states: States, gateway: StateGateway, layer: int) -> Tensor:
    gateway.export(layer, states)
    return _ExportStates.apply(output, *states, gateway, layer)  # type: ignore[no-any-return, no-untyped-call]
