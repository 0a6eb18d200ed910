"""How a step computes: precision, memory options, threads."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from treering.errors import ConfigError, UnsupportedError
from treering.model.layers import Layers, set_layers
from treering.train.gradient.activations import ParentsOption
from treering.train.gradient.auto_tokens import DEFAULT_TOKENS, MaxTokens
from treering.tree.plan.costs import CostModel
from treering.types import is_count

GradientCheckpointing = Literal["none", "reentrant", "non_reentrant"]
Autocast = Literal["none", "bfloat16"]
LayersOption = Layers | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """How a loop computes its steps: memory, speed and precision.

    Attributes:
        max_tokens: distinct tokens per micro-batch and per partition; "auto" goes by free memory on CUDA, None computes
            a step at once.
        parents: for trees over `max_tokens`, see `backward`.
        costs: skips sharing where it would be slower, see `backward`.
        autocast: "bfloat16" computes in bfloat16 where torch's autocast does; weights keep their dtype.
        gradient_checkpointing: whether and in which of torch's two ways the backward recomputes activations.
        backend: of the attention.
        layers: how the model's layers run, see `set_layers`; "auto" measures it on CUDA in the first step.
        num_steps: of the whole run, which "auto" counts compile time against; None keeps "auto" at stock layers.

    Example: `ComputeOptions(max_tokens=16_384)` keeps the activations of at most 16,384 tokens at once.
    """

    max_tokens: MaxTokens = None
    parents: ParentsOption = "auto"
    costs: CostModel | None = None
    autocast: Autocast = "none"
    gradient_checkpointing: GradientCheckpointing = "none"
    backend: str = "auto"
    layers: LayersOption = "stock"
    num_steps: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens not in (None, "auto") and not is_count(self.max_tokens, least=1):
            raise ConfigError(f'max_tokens is at least 1 or "auto", got {self.max_tokens!r}; None sets no limit')

    @property
    def max_tokens_on_ranks(self) -> int | None:
        """The limit where several ranks plan alike: free memory, which differs, does not count."""
        return DEFAULT_TOKENS if self.max_tokens == "auto" else self.max_tokens


def prepare_model(model: nn.Module, options: ComputeOptions) -> None:
    """Sets training mode, gradient checkpointing and layers as the options say; "auto" leaves layers as they are.

    Raises:
        MissingExtraError: layers by Liger without liger-kernel.
        UnsupportedError: the model cannot recompute activations, or Liger's kernels are not exact for it.
    """
    model.train()
    enable_gradient_checkpointing(model, options.gradient_checkpointing)
    if options.layers != "auto":
        set_layers(model, options.layers)


def precision(model: nn.Module, autocast: Autocast) -> AbstractContextManager[object]:
    """Context manager for the precision: bfloat16 autocast, or the weights' own dtype."""
    if autocast == "none":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Context manager in which torch uses `count` threads; None changes nothing."""
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
    """Enables gradient checkpointing by whichever method transformers has; "none" changes nothing.

    Raises:
        UnsupportedError: the model has no such method.
    """
    if mode == "none":
        return
    arguments = {"use_reentrant": mode == "reentrant"}
    # transformers 5.23 deprecates the older name; 5.17 has only that one.
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
    """Peak memory that torch has allocated on the model's CUDA device so far; None on CPU."""
    device = next(model.parameters()).device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
