"""Padding that leaves a recurrent state unchanged, so that rows of different lengths can share a call.

Every token updates the state by a step that its own gates choose: with Gated DeltaNet a decay and a learning rate, with
Mamba-2 a time step. Both are softplus or sigmoid of a projection; where that is very negative, the step is exactly
zero. So the projections' outputs are overwritten at padding.

    B rows   L tokens of the longest
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treering.errors import UnsupportedError

CLOSED = -1e4
"""softplus and sigmoid of this, plus any bias that a trained model has, are exactly 0 in float64 and below."""


class Gate(NamedTuple):
    """A projection whose last `num_columns` outputs decide how far a token moves the state; None: all of them."""

    projection: nn.Module
    num_columns: int | None


def gates_of(mixer: nn.Module) -> list[Gate]:
    """The gates of a mixer.

    Raises:
        UnsupportedError: a mixer whose gates are not known, or cannot be closed, by name.
    """
    name = type(mixer).__name__
    limit: Any = getattr(mixer, "time_step_limit", (0.0, float("inf")))
    if limit[0] > 0:
        raise UnsupportedError(
            f"{name} has time_step_limit={tuple(limit)}: with a lower bound above 0 padding would move the state; set "
            "it to (0.0, inf) in the config"
        )
    if hasattr(mixer, "in_proj_ba"):
        return [Gate(mixer.in_proj_ba, None)]  # type: ignore[arg-type]
    if hasattr(mixer, "in_proj_a") and hasattr(mixer, "in_proj_b"):
        return [Gate(mixer.in_proj_a, None), Gate(mixer.in_proj_b, None)]  # type: ignore[arg-type]
    if hasattr(mixer, "in_proj") and hasattr(mixer, "dt_bias"):
        return [Gate(mixer.in_proj, mixer.dt_bias.shape[0])]  # type: ignore[arg-type, index]
    raise UnsupportedError(f"recurrent layer {name} is not known: supported are Gated DeltaNet and Mamba-2 layers")


@contextmanager
def closed_gates(mixer: nn.Module, padding: Tensor | None) -> Iterator[None]:
    """Context manager that closes a mixer's gates at padding (bool [B, L]); None closes nothing.

    Example: of the rows [5, 6, 7] and [5, padding, padding] the second ends in the state after its 5.
    """
    if padding is None:
        yield
        return
    with ExitStack() as undo:
        for gate in gates_of(mixer):
            handle = gate.projection.register_forward_hook(partial(_close, padding, gate.num_columns))
            undo.callback(handle.remove)
        yield


def _close(
    padding: Tensor, num_columns: int | None, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    """A forward hook that overwrites gates at padding."""
    width = output.shape[-1]
    is_gate = torch.arange(width, device=output.device) >= width - (num_columns or width)
    return output.masked_fill(padding[..., None] & is_gate, CLOSED)
