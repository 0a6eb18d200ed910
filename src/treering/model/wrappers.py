"""Unwrap a causal language model: remove the wrapper of `torch.compile` and PEFT adapters, in any order.

`torch.compile(model)` returns a wrapper whose graph is that of the model's own `forward`, which the tree step does not
call: it calls the decoder, so the decoder is compiled instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from treering.errors import UnsupportedError


class Unwrapped(NamedTuple):
    """How to compile a part the way the whole model was compiled, and the unwrapped model."""

    compile_part: Callable[[Callable[..., Any]], Callable[..., Any]]
    model: nn.Module


def unwrap(model: nn.Module) -> Unwrapped:
    """Removes a model's wrappers. Without `torch.compile`, parts are called unchanged.

    Layers and decoders that were compiled in place (`layer.compile()`) work unchanged.

    Raises:
        UnsupportedError: an adapter with virtual tokens, or whose own forward passes something to its layers; a whole
            model that was compiled in place, which would silently run uncompiled.

    Example:
        >>> compile_part, model = unwrap(torch.compile(nn.Linear(2, 2)))     # doctest: +SKIP
        >>> type(model).__name__                                             # doctest: +SKIP
        'Linear'
    """
    compile_part: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is
    while isinstance(model, nn.Module):
        # Not by attribute access: PEFT forwards unknown attributes to the model inside.
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            compile_part, model = _compiler_of(model), compiled
            continue
        _check_compiled_elsewhere(model)
        if not hasattr(model, "get_base_model"):
            break
        model = _without_adapter(model)
    return Unwrapped(compile_part, model)


def _compiler_of(wrapper: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = wrapper.dynamo_ctx
    return compiler


def _without_adapter(model: Any) -> nn.Module:
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedError(
            f"PEFT method {type(adapter).__name__} adds virtual tokens, which have no place in a forest: use LoRA"
        )
    tuner = model.base_model
    if isinstance(tuner, nn.Module):
        _check_passes_nothing(tuner)
        _check_compiled_elsewhere(tuner)
    inner: nn.Module = model.get_base_model()
    return inner


def _check_passes_nothing(tuner: nn.Module) -> None:
    """Refuses adapters whose layers need what the outer forward computes for them, such as tasks or gates."""
    for config in getattr(tuner, "peft_config", {}).values():
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise UnsupportedError(
                "aLoRA finds its invocation tokens in the outer forward, which the tree step does not call, so its "
                "adapters would train nothing: leave out alora_invocation_tokens, which is plain LoRA"
            )
    forward = type(tuner).forward
    if forward.__module__ != "peft.tuners.tuners_utils":
        raise UnsupportedError(
            f"PEFT method {type(tuner).__name__} has a forward of its own around the model, which the tree step does "
            "not call, so its adapters or its loss would be wrong: use LoRA"
        )


def _check_compiled_elsewhere(model: nn.Module) -> None:
    if model._compiled_call_impl is not None:
        raise UnsupportedError(
            f"{type(model).__name__}.compile() compiles a forward that the tree step does not call: compile its layers "
            "in place, `for layer in model.model.layers: layer.compile()`, or wrap it, `torch.compile(model)`"
        )


def _as_it_is(part: Callable[..., Any]) -> Callable[..., Any]:
    return part
