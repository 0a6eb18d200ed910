"""How the layers of a model run: as they are, compiled, or by Liger's kernels for norms, rotations and gates.

All three work in place: names of modules, their parameters and what a checkpoint holds stay the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from treering.errors import UnsupportedError
from treering.extras import require
from treering.model.families import ModelParts, find_parts
from treering.model.wrappers import unwrap

Layers = Literal["stock", "compiled", "liger"]
"""stock: as transformers runs them. compiled: each layer by torch.compile. liger: the kernels of liger-kernel."""

LIGER_ACTIVATIONS = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "olmo2", "smollm3", "glm4"), "silu"),
        **dict.fromkeys(("gemma2", "gemma3_text"), "gelu_pytorch_tanh"),
    }
)
"""The families that Liger's kernels are exact for, each with the one activation that they compute."""

_NUM_GRAPHS = 32
"""Graphs of the same code that torch may keep: passes with and without gradients, kinds of layers, partitions."""


def set_layers(model: nn.Module, layers: Layers) -> Callable[[], None]:
    """Changes how the layers of a model run, in place; returns what takes it back.

    Compiled layers have dynamic shapes, so that forests of other sizes run the same graphs. Of Liger, everything but
    its losses is used; its rotation is a function of the family, and so changes for all models of it in the process.

    Args:
        model: a supported model, or a PEFT model of one.
        layers: "stock" changes nothing.

    Raises:
        MissingExtraError: "liger" without liger-kernel.
        UnsupportedError: "liger" for a family, an activation or a device that its kernels are not exact for.

    Example:
        >>> undo = set_layers(model, "compiled")                            # doctest: +SKIP
        >>> layers_of(model), undo(), layers_of(model)                      # doctest: +SKIP
        ('compiled', None, 'stock')
    """
    return {"stock": _keep, "compiled": _compile, "liger": _apply_liger}[layers](model)


def layers_of(model: nn.Module) -> Layers:
    """How the layers of a model or of a decoder run now, whoever has changed them.

    Example: "compiled" after `for layer in model.model.layers: layer.compile()`.
    """
    modules: list[Any] = list(model.modules())
    if any(module._compiled_call_impl is not None for module in modules):
        return "compiled"
    return "liger" if any(module._get_name().startswith("Liger") for module in modules) else "stock"


def _keep(model: nn.Module) -> Callable[[], None]:
    return lambda: None


def compiled_layers(layers: Sequence[Any], **options: Any) -> Callable[[], AbstractContextManager[None]]:
    """Compiles layers; returns a context manager, to be entered often, inside which they run compiled.

    Args:
        layers: modules of a model.
        options: of `torch.compile`; shapes are dynamic.

    Example:
        >>> compiled = compiled_layers(model.model.layers, mode="reduce-overhead")         # doctest: +SKIP
        >>> with compiled():                                                               # doctest: +SKIP
        ...     out = forward(model, forest)
    """
    _allow_graphs()
    calls = [torch.compile(layer._call_impl, dynamic=True, **options) for layer in layers]

    @contextmanager
    def compiled() -> Iterator[None]:
        before = [layer._compiled_call_impl for layer in layers]
        for layer, call in zip(layers, calls, strict=True):
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer, call in zip(layers, before, strict=True):
                layer._compiled_call_impl = call

    return compiled


def _allow_graphs() -> None:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _NUM_GRAPHS)


def _compile(model: nn.Module) -> Callable[[], None]:
    layers = find_parts(model).layers
    _allow_graphs()
    before = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer.compile(dynamic=True)

    def undo() -> None:
        for layer, call in zip(layers, before, strict=True):
            layer._compiled_call_impl = call

    return undo


def _apply_liger(model: nn.Module) -> Callable[[], None]:
    causal_lm: Any = unwrap(model).model
    parts = find_parts(model)
    _check_liger(parts)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    attention: Any = parts.layers[0].self_attn
    code = vars(sys.modules[type(attention).__module__])
    before = dict(code)
    modules = {module: dict(vars(module)) for module in causal_lm.modules()}
    _apply_liger_kernel_to_instance(causal_lm, cross_entropy=False, fused_linear_cross_entropy=False)
    # It also replaces the classes of models that are made later, such as a teacher.
    code.update({name: value for name, value in before.items() if isinstance(value, type)})

    def undo() -> None:
        code.update(before)
        for module, values in modules.items():
            vars(module).clear()
            vars(module).update(values)

    return undo


def _check_liger(parts: ModelParts) -> None:
    require('layers = "liger"', "liger_kernel")
    config: Any = parts.config
    if parts.vision is not None:
        raise UnsupportedError(
            f"Liger's kernels are exact for models of text, and model type {parts.vision.family!r} takes pictures: set "
            'layers to "compiled" or "stock"'
        )
    if config.model_type not in LIGER_ACTIVATIONS:
        raise UnsupportedError(
            f"Liger's kernels are exact for {', '.join(LIGER_ACTIVATIONS)}, and model type {config.model_type!r} is "
            'none of them: set layers to "compiled" or "stock"'
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != LIGER_ACTIVATIONS[config.model_type]:
        raise UnsupportedError(
            f"Liger's kernels compute {LIGER_ACTIVATIONS[config.model_type]} for model type {config.model_type!r}, and "
            f'this model has the activation {activation!r}: set layers to "compiled" or "stock"'
        )
    import triton

    if parts.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            f'Liger\'s kernels run on CUDA, and the model is on {parts.device.type}: set layers to "stock" or '
            '"compiled"'
        )
