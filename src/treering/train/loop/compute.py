"""How a step computes: precision, memory options, threads."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from treering.errors import ConfigError, UnsupportedError
from treering.train.gradient.activation_policy import ParentsOption
from treering.tree.plan.costs import CostModel
from treering.types import is_count

GradientCheckpointing = Literal["none", "reentrant", "non_reentrant"]
Autocast = Literal["none", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """How a loop computes its steps: memory, time and precision. What a step learns is chosen elsewhere.

    Attributes:
        max_tokens: distinct tokens per micro-batch and per partition; None computes a step at one time.
        parents: of trees over `max_tokens`, see `backward`.
        max_bytes: room for activations, see there.
        costs: skips sharing where it would be slower, see there.
        autocast: "bfloat16" computes in bfloat16 where torch's autocast allows, over the weights' own dtype.
        gradient_checkpointing: recompute activations in the backward, by which of torch's two ways.
        backend: of the attention.

    Example: `ComputeOptions(max_tokens=16_384)` keeps the activations of 16,384 tokens at one time, at most.
    """

    max_tokens: int | None = None
    parents: ParentsOption = "auto"
    max_bytes: int | None = None
    costs: CostModel | None = None
    autocast: Autocast = "none"
    gradient_checkpointing: GradientCheckpointing = "none"
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not is_count(self.max_tokens, least=1):
            raise ConfigError(f"max_tokens is at least 1, got {self.max_tokens!r}; None sets no limit")


def prepare_model(model: nn.Module, options: ComputeOptions) -> None:
    """Puts a model into training mode, with gradient checkpointing as the options say.

    Raises:
        UnsupportedError: the model cannot recompute activations.
    """
    model.train()
    enable_gradient_checkpointing(model, options.gradient_checkpointing)


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
