"""Find the routers of a mixture of experts and record their outputs in a forward.

N tokens   E experts   k experts per token
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from treering.errors import StateError, UnsupportedError
from treering.families import FAMILIES
from treering.model.tree_model import TreeModel

_RECORDING = "_treering_recording"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routers:
    """Routers of a model.

    Attributes:
        modules: one per layer with experts, in order; each returns logits, scores and chosen experts.
        num_experts: number of experts of each router, E.
    """

    modules: tuple[nn.Module, ...]
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Output of one router.

    Attributes:
        logits: [N, E], differentiable.
        chosen: [N, k] indices of the experts that each token was routed to.
    """

    logits: Float[Tensor, "N E"]
    chosen: Int[Tensor, "N k"]


def find_routers(model: TreeModel) -> Routers:
    """Return the routers of a model, with or without PEFT adapters.

    Raises:
        UnsupportedError: the model has no routers.

    Example: a Mixtral of 32 layers with 8 experts has 32 routers; a Qwen3-MoE whose first layer is dense has one fewer
        than
    layers.
    """
    config: Any = model.config
    name = model.family.router
    # A dense layer's `mlp` has no router.
    found = (getattr(layer.mlp, name, None) if name else None for layer in model.layers)
    modules = tuple(module for module in found if isinstance(module, nn.Module))
    if not modules:
        with_routers = (family.model_type for family in FAMILIES.values() if family.router)
        raise UnsupportedError(
            f"router losses need a mixture of experts ({', '.join(with_routers)}), and model type "
            f"{config.model_type!r} has no routers; remove router_losses"
        )
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    return Routers(modules=modules, num_experts=num_experts)


@contextmanager
def router_hooks(routers: Routers | None) -> Iterator[None]:
    """Hook the routers, inside the context, so that forwards can be recorded; None hooks nothing.

    The context must enclose a whole step, because torch.compile keeps the hooks that it saw in the first forward.
    """
    handles = [] if routers is None else [module.register_forward_hook(_record) for module in routers.modules]
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
