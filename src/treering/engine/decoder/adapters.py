"""Weights of modules that a PEFT adapter may wrap: LoRA is merged while a snapshot is filled, trained copies are read.

The trained model is only read: nothing is merged in place, so nothing has to be unmerged, which would round weights.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treering.errors import UnsupportedError


class WeightSource(NamedTuple):
    """A weight as the model has it, and the LoRA layer whose active adapters add to it."""

    weight: Tensor
    lora: Any = None

    def fill(self, target: Tensor) -> None:
        """Copies the weight, adapters added, into a tensor of its shape.

        Adds in float32 or wider, and rounds to the target's dtype once.
        """
        if self.lora is None or not (names := active_adapters(self.lora)):
            target.copy_(self.weight)
            return
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32), copy=True)
        for name in names:
            wide += self.lora.get_delta_weight(name)
        target.copy_(wide)


def source_of(module: nn.Module) -> WeightSource:
    """Where the weight of a linear layer, an embedding or a norm comes from.

    Example: a LoRA layer around a projection is the source (projection.weight, layer).
    """
    own = _trained(module)
    return WeightSource(own.base_layer.weight, own) if is_lora(own) else WeightSource(own.weight)


def bias_of(module: nn.Module) -> Tensor | None:
    """The bias of a linear layer, wrapped or not."""
    own: Any = plain_of(module)
    bias: Tensor | None = own.bias
    return bias


def plain_of(module: nn.Module) -> nn.Module:
    """The module that holds the weight: inside a LoRA layer, or the copy that PEFT trains in full.

    Example: `plain_of(nn.Linear(2, 2))` is that layer itself.
    """
    own = _trained(module)
    plain: nn.Module = own.base_layer if is_lora(own) else own
    return plain


def check_adapter(module: nn.Module, name: str) -> None:
    """Checks that the adapters of a module are plain LoRA.

    Raises:
        UnsupportedError: a variant such as DoRA, a bias of an adapter, or an adapter merged in place and disabled.
    """
    own = _trained(module)
    if not is_lora(own):
        return
    for adapter in active_adapters(own):
        variant = getattr(own, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise UnsupportedError(
                f"{name}: adapter {adapter!r} is a {getattr(variant, '__name__', type(variant).__name__)}, and the "
                "engine adds plain LoRA; train with use_dora=False, or merge the adapter"
            )
        if getattr(own, "lora_bias", {}).get(adapter):
            raise UnsupportedError(
                f"{name}: adapter {adapter!r} has a bias of its own, which the engine does not read; set "
                "lora_bias=False, or merge the adapter"
            )
    if own.merged and own.disable_adapters:
        raise UnsupportedError(f"{name}: its adapter is merged and disabled; call unmerge_adapter() first")


def is_lora(module: nn.Module) -> bool:
    """Whether a module is a LoRA layer of PEFT."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


def active_adapters(lora: Any) -> list[str]:
    """Adapters that add to the base weight in the present forward: none where disabled, or merged into it already."""
    if lora.disable_adapters or lora.merged:
        return []
    return [name for name in lora.active_adapters if name in lora.lora_A or name in lora.lora_embedding_A]


def _trained(module: Any) -> Any:
    """The copy that PEFT trains in full (`modules_to_save`), or the module itself."""
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        return module
    names = [] if module.disable_adapters else list(module.active_adapters)
    return copies[names[0]] if names and names[0] in copies else module.original_module
