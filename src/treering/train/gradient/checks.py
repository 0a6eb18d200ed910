"""Checks before a tree step adds its first gradient: inputs that do not fit the model, the objective or torch."""

from collections.abc import Sequence

import torch
from torch import nn

from treering.errors import InputError, StateError
from treering.model.checks import check_no_hooks
from treering.model.families import ModelParts
from treering.model.forward import check_forest, check_temperature
from treering.model.routers import Routers, find_routers
from treering.train.gradient.router_losses import RouterLosses
from treering.train.objectives import Objective
from treering.tree.forest import Forest


def check_inputs(
    model: nn.Module,
    parts: ModelParts,
    forests: Sequence[Forest],
    objective: Objective,
    temperature: float,
    value_head: nn.Module | None,
) -> None:
    """Refuses inputs that a step cannot train, or not exactly.

    Raises:
        InputError: a forest, objective, temperature or value head that does not fit.
        UnsupportedError: the model has a forward hook.
        StateError: gradients are switched off, or no parameter requires one.
    """
    check_no_hooks(model)
    check_temperature(temperature)
    if value_head is not None and not isinstance(value_head, nn.Module):
        raise InputError(f"value_head is a module, such as nn.Linear(hidden size, 1), got {type(value_head).__name__}")
    hidden_size = parts.config.hidden_size
    if isinstance(value_head, nn.Linear) and value_head.in_features != hidden_size:
        raise InputError(
            f"value_head reads hidden states of {hidden_size} numbers, got one that reads {value_head.in_features}: "
            f"use nn.Linear({hidden_size}, 1)"
        )
    for forest in forests:
        check_forest(forest, parts)
    if not isinstance(objective, Objective):
        raise InputError(f"expected an objective, got {objective!r}: call one, such as treering.objectives.sft()")
    if ("value" in objective.needs) != (value_head is not None):
        raise InputError(
            f"a value head is given where the objective trains one: {objective.name} "
            + ("does, and value_head is None" if value_head is None else "does not; leave it out, or give ppo returns")
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise StateError("backward needs gradients, and they are switched off here: leave no_grad or inference_mode")
    heads = [] if value_head is None else [*value_head.parameters()]
    if not any(weight.requires_grad for weight in (*model.parameters(), *heads)):
        raise StateError("backward needs a parameter with requires_grad=True, and all are frozen: unfreeze some")


def routers_of(router_losses: RouterLosses | None, parts: ModelParts) -> Routers | None:
    """The routers that the losses apply to; None without losses.

    Raises:
        InputError: not a `RouterLosses`.
        UnsupportedError: a model without routers.
    """
    if router_losses is not None and not isinstance(router_losses, RouterLosses):
        raise InputError(f"router_losses is a RouterLosses, such as RouterLosses(balance=0.001), got {router_losses!r}")
    return None if router_losses is None else find_routers(parts)
