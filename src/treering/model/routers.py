"""Find the routers of a mixture of experts, record their outputs in a forward, and replay routes of a rollout.

N tokens   E experts   k experts per token
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.attention import TreeLayout
from treering.attention.layout import to_device
from treering.data.routed_experts import NO_ROUTE
from treering.errors import InputError, StateError, UnsupportedError
from treering.families import FAMILIES
from treering.model.tree_model import TreeModel

_RECORDING = "_treering_recording"
_REPLAY = "_treering_replay"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routers:
    """Routers of a model.

    Attributes:
        modules: one per layer with experts, in order; each returns logits, scores and chosen experts.
        num_experts: number of experts of each router, E.
        num_active: number of experts per token, k.
    """

    modules: tuple[nn.Module, ...]
    num_experts: int
    num_active: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Output of one router.

    Attributes:
        logits: [N, E], differentiable.
        chosen: [N, k] indices of the experts that each token was routed to.
    """

    logits: Float[Tensor, "N E"]
    chosen: Int[Tensor, "N k"]


def find_routers(model: TreeModel, needed_by: str = "router_losses") -> Routers:
    """Return the routers of a model, with or without PEFT adapters.

    Raises:
        UnsupportedError: the model has no routers, which `needed_by` needs.

    Example: a Mixtral of 32 layers with 8 experts has 32 routers; a Qwen3-MoE whose first layer is dense has one fewer
    than layers.
    """
    config: Any = model.config
    name = model.family.router
    modules = tuple(getattr(model.layers[layer].mlp, name or "") for layer in layers_with_experts(model))
    if not modules:
        with_routers = (family.model_type for family in FAMILIES.values() if family.router)
        raise UnsupportedError(
            f"{needed_by} need a mixture of experts ({', '.join(with_routers)}), and model type "
            f"{config.model_type!r} has no routers; remove {needed_by}"
        )
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    return Routers(modules=modules, num_experts=num_experts, num_active=config.num_experts_per_tok)


def layers_with_experts(model: TreeModel) -> list[int]:
    """Return the indices of the layers with experts, ascending.

    Example: [1, 2, 3] for a Qwen3-MoE of 4 layers whose first one is dense, [] for a Qwen3.
    """
    name = model.family.router
    # A dense layer's `mlp` has no router.
    found = (getattr(layer.mlp, name, None) if name else None for layer in model.layers)
    return [layer for layer, router in enumerate(found) if isinstance(router, nn.Module)]


def check_routes(routes: NDArray[np.int16], model: TreeModel) -> None:
    """Check that a model can replay routes, int16 [N, L, k].

    Raises:
        UnsupportedError: the model has no routers.
        InputError: routes of other layers, of another number of experts per token, or of an expert that is not there.
    """
    routers = find_routers(model, "routed_experts")
    expected = (len(routers.modules), routers.num_active)
    largest = int(routes.max(initial=NO_ROUTE))
    if routes.shape[1:] != expected or largest >= routers.num_experts:
        raise InputError(
            f"routed_experts must hold {expected[1]} of {routers.num_experts} experts in {expected[0]} layers for this "
            f"model, got {list(routes.shape[1:])} with expert {largest}; replay routes of the same model"
        )


@contextmanager
def replayed_routes(routers: Iterable[tuple[int, nn.Module]], layout: TreeLayout) -> Iterator[None]:
    """Let routers choose the experts of a layout's forest, inside the context; without routes nothing changes.

    The weights of the chosen experts are those that the router gives them, so gradients flow as in a forward that
    chose them. `routers` holds the number of each router among the model's, and the router.

    Raises:
        StateError: a router did not run, as inside layers that were compiled before.
    """
    if layout.forest.routed_experts is None:
        yield
        return
    chosen = layout.once("routed experts", lambda: _by_layer(layout))
    # The first run of a checkpointed layer is inside the context of its forward, its recompute is not.
    replays = {module: _Replay(chosen=chosen[i]) for i, module in routers if _REPLAY not in module.__dict__}
    # Before the hook that records, which then sees the replayed experts.
    handles = [module.register_forward_hook(_replay, prepend=True) for module in replays]
    for module, replay in replays.items():
        module.__dict__[_REPLAY] = replay
    try:
        yield
    finally:
        for handle, module in zip(handles, replays, strict=True):
            handle.remove()
            del module.__dict__[_REPLAY]
    if not all(replay.has_run for replay in replays.values()):
        raise StateError(
            f"each of {len(replays)} routers must replay its routes, and {sum(r.has_run for r in replays.values())} "
            "did; call torch.compiler.reset() once if layers were compiled before, and use plain modules as routers"
        )


def _by_layer(layout: TreeLayout) -> Int[Tensor, "L N k"]:
    routes = layout.forest.routed_experts
    assert routes is not None
    return to_device(routes, layout.device).long().transpose(0, 1)


@dataclass(slots=True, kw_only=True, eq=False)
class _Replay:
    chosen: Int[Tensor, "N k"]
    has_run: bool = False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _replay(
    module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    replay: _Replay | None = module.__dict__.get(_REPLAY)
    if replay is None:
        return None
    replay.has_run = True
    logits, scores, own = output
    given = replay.chosen.to(own.device)
    chosen = torch.where(given == NO_ROUTE, own, given.to(own.dtype))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Normalised shares of the chosen experts are the softmax of their logits alone.
    is_normalised = getattr(module, "norm_topk_prob", True)
    at = chosen.long()
    weights = wide.gather(-1, at).softmax(-1) if is_normalised else wide.softmax(-1).gather(-1, at)
    return logits, weights.to(scores.dtype), chosen


@contextmanager
def router_hooks(routers: Routers) -> Iterator[None]:
    """Hook the routers, inside the context, so that forwards can be recorded.

    The context must enclose a whole step, because torch.compile keeps the hooks that it saw in the first forward.
    """
    handles = [module.register_forward_hook(_record) for module in routers.modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_routes(routers: Routers) -> Iterator[list[Routes]]:
    """Record one decoder forward, inside `router_hooks`; yield a list that gets one entry per router.

    The entries are in layer order and belong to the forward's graph, also with torch's non-reentrant checkpointing. A
    recompute records nothing.

    Raises:
        UnsupportedError: a router that runs without gradients inside a forward with gradients, as under reentrant
            checkpointing; it could not be trained.
        StateError: routers that did not run.

    Example:
        >>> routers = find_routers(tree_model)                                 # doctest: +SKIP
        >>> with router_hooks(routers), recorded_routes(routers) as routes:  # doctest: +SKIP
        ...     hidden = hidden_states(tree_model, forest)
        >>> len(routes), routes[0].logits.shape                           # doctest: +SKIP
        (32, torch.Size([1024, 8]))
    """
    recording = _Recording(wants_gradients=torch.is_grad_enabled())
    for module in routers.modules:
        module.__dict__[_RECORDING] = recording
    try:
        yield recording.routes
    finally:
        for module in routers.modules:
            del module.__dict__[_RECORDING]
    if len(recording.routes) != len(routers.modules):
        raise StateError(
            f"each of the {len(routers.modules)} routers must run once per forward, and {len(recording.routes)} did; "
            "call torch.compiler.reset() once if layers were compiled before the first router losses; a kernel "
            "that replaces a router cannot be recorded, so use the plain module"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Recording:
    wants_gradients: bool
    routes: list[Routes] = field(default_factory=list)


# One function that finds the recording on its module: a compiled layer keeps the hook that it was traced with.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _record(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    recording: _Recording | None = module.__dict__.get(_RECORDING)
    if recording is None:
        return
    if recording.wants_gradients and not torch.is_grad_enabled():
        raise UnsupportedError(
            "router losses need the routers' gradients, which reentrant gradient checkpointing does not give; set "
            "gradient_checkpointing=non_reentrant (use_reentrant=False), or remove router_losses"
        )
    logits, _, chosen = output
    recording.routes.append(Routes(logits=logits, chosen=chosen))
