"""How the layers of a model run: unchanged, compiled, or with Liger's kernels for norms, rotations and gates.

All three work in place: module names, parameters and the content of checkpoints stay the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.fx.experimental import _config as shape_config

from treering.errors import MissingExtraError, UnsupportedError
from treering.extras import require
from treering.families import FAMILIES
from treering.model.tree_model import TreeModel

Layers = Literal["stock", "compiled", "liger"]
"""stock: as in transformers. compiled: each layer by torch.compile. liger: the kernels of liger-kernel."""

_NUM_GRAPHS = 32
"""Number of graphs of one function that torch may keep: with and without gradients, kinds of layers, partitions."""


LONG_RUN_STEPS = 200
"""Steps from which `auto` compiles, which takes 30 to 40 s and saves at most a third of a step."""


def choose_layers(
    model: nn.Module | TreeModel, num_steps: int | None, *, num_ranks: int, device: torch.device
) -> tuple[Layers, str]:
    """Choose how `layers = "auto"` runs a model's layers, and why: on CUDA by Liger if it is exact, else compiled.

    The choice uses no clock. Layers that are already changed stay so, and layers on other devices stay stock.

    Args:
        model: a supported model, or a PEFT model of one.
        num_steps: steps of the run; None (unknown) counts as few.
        num_ranks: number of ranks that train the model; several compile nothing.
        device: device of the model.

    Example: Qwen3 on a GPU with liger-kernel runs "liger"; without it, for 1,000 steps on one rank, "compiled".
    """
    own = layers_of(model.model if isinstance(model, TreeModel) else model)
    if own != "stock" or device.type != "cuda":
        return own, "as the model came"
    try:
        _check_liger(TreeModel.of(model))
    except (MissingExtraError, UnsupportedError) as error:
        why = str(error).partition(": ")[0]
    else:
        return "liger", "its kernels are exact for this model"
    if num_ranks > 1 or num_steps is None or num_steps < LONG_RUN_STEPS:
        return "stock", f"{why}, and runs of {LONG_RUN_STEPS} steps or more on one rank are compiled"
    return "compiled", why


def set_layers(model: nn.Module | TreeModel, layers: Layers) -> Callable[[], None]:
    """Change how the layers of a model run, in place; return a function that undoes the change.

    Compiled layers have dynamic shapes, so forests of other sizes run the same graphs. All of Liger except its losses
    is used; its rotation is a function of the family, so it changes for all models of the family in the process.

    Args:
        model: a supported model, or a PEFT model of one.
        layers: "stock" changes nothing.

    Raises:
        MissingExtraError: "liger" without liger-kernel installed.
        UnsupportedError: "liger" for a family, activation or device for which its kernels are not exact.

    Example:
        >>> undo = set_layers(model, "compiled")                            # doctest: +SKIP
        >>> layers_of(model), undo(), layers_of(model)                      # doctest: +SKIP
        ('compiled', None, 'stock')
    """
    if layers == "stock":
        return lambda: None
    bound = TreeModel.of(model)
    return _compile(bound.layers) if layers == "compiled" else _apply_liger(bound)


def layers_of(model: nn.Module) -> Layers:
    """Return how the layers of a model or decoder run now, whoever changed them.

    Example: "compiled" after `for layer in model.model.layers: layer.compile()`.
    """
    modules: list[Any] = list(model.modules())
    if any(module._compiled_call_impl is not None for module in modules):
        return "compiled"
    return "liger" if any(module._get_name().startswith("Liger") for module in modules) else "stock"


def compiled_layers(layers: Sequence[Any], **options: Any) -> Callable[[], AbstractContextManager[None]]:
    """Compile layers; return a context manager, which may be entered often, inside which they run compiled.

    Args:
        layers: modules of a model.
        options: options of `torch.compile`; shapes are dynamic.

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
    # Sizes that are equal by chance in the first forest may differ in the next one.
    shape_config.use_duck_shape = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _NUM_GRAPHS)


def _compile(layers: Sequence[Any]) -> Callable[[], None]:
    _allow_graphs()
    before = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer.compile(dynamic=True)

    def undo() -> None:
        for layer, call in zip(layers, before, strict=True):
            layer._compiled_call_impl = call

    return undo


def _apply_liger(model: TreeModel) -> Callable[[], None]:
    causal_lm: Any = model.causal_lm
    _check_liger(model)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    attention: Any = model.layers[0].self_attn
    code = vars(sys.modules[type(attention).__module__])
    before = dict(code)
    modules = {module: dict(vars(module)) for module in causal_lm.modules()}
    _apply_liger_kernel_to_instance(causal_lm, cross_entropy=False, fused_linear_cross_entropy=False)
    # It also replaces the classes of models that are built later, such as a teacher.
    code.update({name: value for name, value in before.items() if isinstance(value, type)})

    def undo() -> None:
        code.update(before)
        for module, values in modules.items():
            vars(module).clear()
            vars(module).update(values)

    # Liger changes nothing in a family that it does not know, and says so only in its log.
    if layers_of(causal_lm) != "liger":
        undo()
        raise UnsupportedError(
            f"liger-kernel has no kernels for {model.config.model_type!r}, whose family has liger_activation="
            f'{model.family.liger_activation!r}; leave it out of the family, or set layers to "compiled" or "stock"'
        )
    return undo


def _check_liger(model: TreeModel) -> None:
    require('layers = "liger"', "liger_kernel")
    config: Any = model.config
    if model.vision is not None:
        raise UnsupportedError(
            f"Liger's kernels are exact for text models only, and model type {model.vision.family!r} takes images; set "
            'layers to "compiled" or "stock"'
        )
    exact_for = model.family.liger_activation
    if exact_for is None:
        known = (family.model_type for family in FAMILIES.values() if family.liger_activation)
        raise UnsupportedError(
            f"Liger's kernels are exact for {', '.join(known)}, but not for model type {config.model_type!r}; set "
            'layers to "compiled" or "stock"'
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != exact_for:
        raise UnsupportedError(
            f"Liger's kernels compute {exact_for} for model type {config.model_type!r}, and "
            f'this model has the activation {activation!r}; set layers to "compiled" or "stock"'
        )
    import triton

    if model.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            f'Liger\'s kernels run on CUDA, and the model is on {model.device.type}; set layers to "stock" or '
            '"compiled"'
        )


def enable_gradient_checkpointing(model: nn.Module, mode: str) -> None:
    """Enable gradient checkpointing by whichever method transformers has; "none" changes nothing.

    Raises:
        UnsupportedError: the model has no such method.
    """
    if mode == "none":
        return
    arguments = {"use_reentrant": mode == "reentrant"}
    # transformers 5.23 deprecates the older name, but 5.17 has no other.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=arguments)
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnsupportedError(
            f"{type(model).__name__} does not support gradient checkpointing; set gradient_checkpointing to none"
        )
    enable(gradient_checkpointing_kwargs=arguments)
