"""How a step computes: its precision, its memory options, its threads.

Knows torch's switches and transformers' names for them. Knows nothing of losses and steps.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from treering.errors import UnsupportedError

GradientCheckpointing = Literal["none", "reentrant", "non_reentrant"]
Autocast = Literal["none", "bfloat16"]


def precision(model: nn.Module, autocast: Autocast) -> AbstractContextManager[object]:
    """A block that computes in bfloat16 where torch's autocast allows, or as the weights are."""
    if autocast == "none":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """A block in which torch computes with `count` threads; None leaves them as they are."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def enable_gradient_checkpointing(model: nn.Module, mode: GradientCheckpointing) -> None:
    """Turns activation recomputation on, by either name that transformers has for it; "none" leaves the model alone.

    Raises:
        UnsupportedError: the model has no such switch.
    """
    if mode == "none":
        return
    arguments = {"use_reentrant": mode == "reentrant"}
    # transformers 5.23 deprecates the older name, and 5.17 knows no other.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=arguments)
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing to enable; set gradient_checkpointing to none"
        )
    enable(gradient_checkpointing_kwargs=arguments)


def peak_memory_bytes(model: nn.Module) -> int | None:
    """Most that torch has held on the model's CUDA device so far; None on CPU."""
    device = next(model.parameters()).device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
