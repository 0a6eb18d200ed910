"""Bind a model once: `TreeModel` finds the parts that the tree step needs, and refuses models that are not exact.

A tree step is exact only if every layer computes a token from its own path, so only the models of
`treering.families` run on a forest. Wrappers of `torch.compile` and PEFT adapters are removed here, in any order.
`torch.compile(model)` compiles the model's own `forward`, which the tree step does not call; its decoder is compiled
instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from treering.errors import UnsupportedError
from treering.families import Family, find_family
from treering.model.images import ImageFeatures, VisionPart, find_vision
from treering.ranks.group import is_running
from treering.ranks.setup import check_parallel
from treering.ranks.units import Shards, find_shards, units_of

RECURRENT_SINCE = (5, 15)
"""First transformers version whose recurrent layers pass inputs to `Cache.update_conv_state` and read them back."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
_RECURRENT = "linear_attention"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_SETTINGS = (
    *("model_type", "layer_types", "use_bidirectional_attention", "router_jitter_noise", "rope_parameters"),
    *("final_logit_softcapping", "logits_scaling", "tie_word_embeddings"),
)
"""Settings of a configuration that binding reads."""

_BOUND: "WeakKeyDictionary[nn.Module, ref[TreeModel]]" = WeakKeyDictionary()
"""Bound `TreeModel` of each model, as long as it is referenced; it must not keep the model alive by itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TreeModel:
    """Causal language model with the parts that the tree step needs; made by `TreeModel.of`.

    Every function of Treering that takes a model also takes its `TreeModel`, and then does not search its parts again.

    Attributes:
        model: the model as given, with its adapters and its compiler's wrapper.
        causal_lm: the Hugging Face model inside.
        family: record of the model's family.
        decoder: embeddings to last hidden state (the model without its output head).
        compile_part: compiles a part the way the whole model was compiled.
        run: calls the decoder, compiled if the model was, inside the units that shard it.
        layers: blocks of the decoder, each called with `attention_mask` by keyword.
        mixers: recurrent layers inside blocks (Gated DeltaNet, Mamba-2), in order.
        embedding: token embedding.
        head: maps hidden states to logits.
        softcap: bound that the model applies to its head's logits; None without one.
        logit_divisor: divisor that the model applies to its head's logits (Granite); 1 elsewhere.
        config: configuration object from which the attention modules read their implementation.
        vocab_size: upper bound of token ids: the rows of the embedding or of the head, whichever are fewer.
        num_logits: rows of the head, including unused ones at its end.
        device: device on which the model computes.
        calls_modules: whether every weight is used in the call of its own module, as in `patch`.
        shards: units of `fully_shard`; None for a model that is not sharded.
        vision: the part that takes images; None for a text model.
        features: features of a step's images, computed beforehand; None computes them in each pass.
    """

    model: nn.Module
    causal_lm: PreTrainedModel
    family: Family
    decoder: nn.Module
    compile_part: Callable[[Callable[..., Any]], Callable[..., Any]]
    run: Callable[..., Any]
    layers: tuple[nn.Module, ...]
    mixers: tuple[nn.Module, ...]
    embedding: nn.Module
    head: nn.Module
    softcap: float | None
    logit_divisor: float
    config: PreTrainedConfig
    vocab_size: int
    num_logits: int
    device: torch.device
    calls_modules: bool
    shards: Shards | None = None
    vision: VisionPart | None = None
    features: ImageFeatures | None = None
    state: tuple[object, ...] = field(default=(), repr=False)
    """State of the model when it was bound; see `_state_of`."""

    @classmethod
    def of(cls, model: "nn.Module | TreeModel", *, calls_modules: bool = False) -> "TreeModel":
        """Bind a supported model, PEFT adapters included; a bound one is returned if its model is unchanged.

        A model that has changed since (an adapter, a head, `fully_shard`, another device) is bound again.

        Args:
            model: the model with its adapters and its compiler's wrapper, or its `TreeModel`.
            calls_modules: whether the caller calls modules as the model itself does, so that ZeRO-3 and vision parts in
                units of `fully_shard` gather their weights.

        Raises:
            UnsupportedError: a model, layer, position encoding or head that would not be exact, with the reason.

        Example:
            >>> tree_model = TreeModel.of(model)                            # doctest: +SKIP
            >>> backward(tree_model, forests, sft())                        # doctest: +SKIP
        """
        if isinstance(model, TreeModel):
            given: nn.Module = model.model
            known: TreeModel | None = model
        else:
            given = model
            found = _BOUND.get(given) if isinstance(given, nn.Module) else None
            known = None if found is None else found()
        check_parallel(given, units_of(given), calls_modules=calls_modules)
        if known is not None and known._fits(calls_modules=calls_modules) and known.state == _state_of(known):
            return known
        bound = _bind(given, calls_modules=calls_modules)
        bound = replace(bound, state=_state_of(bound))
        _BOUND[given] = ref(bound)
        return bound

    def _fits(self, *, calls_modules: bool) -> bool:
        """Return whether this binding serves the caller; only sharded vision parts depend on how modules are called."""
        return self.calls_modules == calls_modules or self.shards is None or self.vision is None

    @property
    def sees_whole_images(self) -> bool:
        """Whether the tokens of an image attend to the whole image."""
        return self.vision is not None and self.vision.sees_whole_images


def _state_of(bound: TreeModel) -> tuple[object, ...]:
    """Return everything that binding reads and that may change while the model stays the same object."""
    modules = tuple(bound.model.modules())
    tables = tuple((_num_rows(table), next(table.parameters()).device) for table in (bound.embedding, bound.head))
    settings = repr([getattr(bound.config, name, None) for name in _SETTINGS])
    is_compiled = bound.causal_lm._compiled_call_impl is not None
    return modules, tuple(map(type, modules)), tables, settings, is_compiled, is_running()


def _bind(model: nn.Module, *, calls_modules: bool) -> TreeModel:
    compile_part, inner = unwrap(model)
    causal_lm = _as_causal_lm(inner)
    check_adapters(causal_lm)
    vision = find_vision(causal_lm)
    decoder = causal_lm.get_decoder()
    config = causal_lm.config if vision is None else decoder.config
    family = _family_of(config, decoder)
    _check_attention(config)
    _check_positions(config)
    _check_output(causal_lm)
    head = causal_lm.get_output_embeddings()
    _check_head(head, config)
    embedding = causal_lm.get_input_embeddings()
    run = compile_part(decoder)
    shards = find_shards(model, decoder=decoder, head=head, run=run)
    if shards is not None:
        _check_tied(config, embedding, head)
        vision = _sharded_vision(vision, shards, calls_modules=calls_modules)
        run = shards.run_decoder
    mixers = (getattr(layer, family.mixer, None) if family.mixer else None for layer in decoder.layers)
    return TreeModel(
        model=model,
        causal_lm=causal_lm,
        family=family,
        decoder=decoder,
        compile_part=compile_part,
        run=run,
        layers=tuple(decoder.layers),
        mixers=tuple(mixer for mixer in mixers if mixer is not None),
        embedding=embedding,
        head=head,
        softcap=getattr(config, "final_logit_softcapping", None) if vision is None else None,
        logit_divisor=float(getattr(config, "logits_scaling", 1.0)),
        config=config,
        vocab_size=min(_num_rows(embedding), _num_rows(head)),
        num_logits=_num_rows(head),
        device=next(embedding.parameters()).device if shards is None else shards.device,
        calls_modules=calls_modules,
        shards=shards,
        vision=vision,
    )


def _as_causal_lm(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        # The module inside DDP would not synchronise its gradients.
        fix = (
            "train it with treering.backward after treering.ranks.prepare, or treering.patch the model before it is "
            "wrapped, and train the wrapper"
            if _holds_module(model)
            else "load it with AutoModelForCausalLM"
        )
        raise UnsupportedError(
            f"tree attention needs a Hugging Face causal language model or a PEFT model of one, got "
            f"{type(model).__name__}: {fix}"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"{type(model).__name__} has no output head; load it with AutoModelForCausalLM")
    return model


def _holds_module(model: nn.Module) -> bool:
    """Return whether the model is a wrapper like DDP, which holds the model inside as `module`."""
    return "module" in model._modules


def _family_of(config: PreTrainedConfig, decoder: Any) -> Family:
    family = find_family(config.model_type)
    if family.mixer and transformers_release() < RECURRENT_SINCE:
        raise UnsupportedError(
            f"model type {config.model_type!r} has recurrent layers, which need transformers "
            f"{'.'.join(map(str, RECURRENT_SINCE))} or newer, got {transformers.__version__}; upgrade transformers"
        )
    supported = (*_LAYER_TYPES, _RECURRENT) if family.mixer else _LAYER_TYPES
    kinds = getattr(config, "layer_types", None) or ()
    if kinds and len(kinds) < len(decoder.layers):
        raise UnsupportedError(
            f"config.layer_types must name every layer, got {len(kinds)} names for {len(decoder.layers)} layers; after "
            "PEFT's layer_replication, set model.config.layer_types to the kinds of the replicated layers"
        )
    for index, kind in enumerate(kinds):
        if kind not in supported:
            raise UnsupportedError(f"layer {index} is {kind!r}; supported are {', '.join(supported)}")
    return family


def transformers_release() -> tuple[int, ...]:
    """Return the major and minor version of the installed transformers."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _check_attention(config: PreTrainedConfig) -> None:
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(
            "use_bidirectional_attention=True lets a token attend to later tokens, which differ between branches; "
            "load a causal model"
        )
    noise = getattr(config, "router_jitter_noise", 0.0)
    if noise:
        raise UnsupportedError(
            f"router_jitter_noise={noise} would give a shared token one noise, but several if its branches were "
            "trained separately; set it to 0 in the config"
        )


def _check_positions(config: PreTrainedConfig) -> None:
    for rope_type in _rope_types(config):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"rope_type {rope_type!r} scales with the length of the batch, so a token's rotation would depend on "
                "other branches; use default, linear, yarn or llama3"
            )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [given for given in parameters.values() if isinstance(given, dict)]
    return [given.get("rope_type", "default") for given in by_layer_type or [parameters]]


def _check_output(causal_lm: PreTrainedModel) -> None:
    """Refuse a `forward` that changes logits: logits are computed from hidden states, without calling it."""
    name = type(causal_lm).__name__
    takes_images = getattr(causal_lm.config, "vision_config", None) is not None
    stock_models = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if takes_images else MODEL_FOR_CAUSAL_LM_MAPPING
    known = (kind for kind in type(causal_lm.config).__mro__ if kind in stock_models)
    kind = next(known, None)
    if kind is None:
        raise UnsupportedError(
            f"{name} has its own configuration class, {type(causal_lm.config).__name__}, whose output transform is "
            "unknown; use a model class of transformers"
        )
    stock = stock_models[kind]
    if type(causal_lm).forward is not stock.forward:
        raise UnsupportedError(
            f"{name} overrides forward, whose output transform would be skipped; use {stock.__name__}"
        )


def _num_rows(table: nn.Module) -> int:
    weight = _inner(table).weight
    # Weights that ZeRO-3 has partitioned have this shape only while they are gathered.
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _inner(module: nn.Module) -> Any:
    """Return the module inside a PEFT adapter (LoRA, or a trained copy), or the module itself."""
    return getattr(module, "base_layer", getattr(module, "original_module", module))


def _check_tied(config: PreTrainedConfig, embedding: nn.Module, head: nn.Module) -> None:
    """Refuse tied embeddings that sharding has split into two weights, each with half of the gradient."""
    if getattr(config, "tie_word_embeddings", False) and _inner(embedding).weight is not _inner(head).weight:
        raise UnsupportedError(
            "tied embeddings are one weight, and fully_shard has made two of them in different units; shard the layers "
            "and then the whole model, `for layer in model.model.layers: fully_shard(layer)`, `fully_shard(model)`, "
            "without a unit for the decoder or the head, or untie them before"
        )


def _sharded_vision(vision: VisionPart | None, shards: Shards, *, calls_modules: bool) -> VisionPart | None:
    """Return the vision part if its units gather its weights: inside the model's own forward, which calls modules.

    Raises:
        UnsupportedError: another caller, which would run it outside of the units around it.
    """
    if vision is None:
        return None
    if not calls_modules:
        raise UnsupportedError(
            f"fully_shard has sharded a model of type {vision.family!r}, whose vision part runs outside of the "
            "decoder's units; train it on one rank, whole on every rank (DDP), or by treering.patch, which calls the "
            "model itself"
        )
    return replace(vision, device=shards.device)


def _check_head(head: nn.Module, config: PreTrainedConfig) -> None:
    if not isinstance(_inner(head), nn.Linear):
        raise UnsupportedError(
            f"the output head of model type {config.model_type!r} must be nn.Linear, got {type(head).__name__}; use "
            "another model"
        )


ADAPTERS = frozenset(
    {
        *("beft", "boft", "c3a", "deft", "delora", "fourierft", "frod", "glora", "gralora", "hira", "hra", "ia3"),
        *("ln_tuning", "loha", "lokr", "lora", "miss", "oft", "osf", "peanut", "psoft", "randlora", "road", "shira"),
        *("supertuning", "tinylora", "trainable_tokens", "unilora", "vblora", "vera", "waveft"),
    }
)
"""Packages of `peft.tuners` whose layers compute each token independently and without noise; tests cover each."""

LORA_VARIANTS = frozenset(
    {"BdLoraLinearVariant", "DoraEmbeddingVariant", "DoraLinearVariant", "KasaLinearVariant", "MiCALinearVariant"}
)
"""Variants of LoRA layers that tests cover too."""


class Unwrapped(NamedTuple):
    """Compiler of the whole model, to apply to its parts, and the unwrapped model."""

    compile_part: Callable[[Callable[..., Any]], Callable[..., Any]]
    model: nn.Module


def unwrap(model: nn.Module) -> Unwrapped:
    """Remove a model's wrappers. Without `torch.compile`, parts are called unchanged.

    Layers and decoders that were compiled in place (`layer.compile()`) work unchanged.

    Raises:
        UnsupportedError: an adapter with virtual tokens, or whose own forward passes something to its layers; a whole
            model compiled in place, which would silently run uncompiled.

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
            f"PEFT method {type(adapter).__name__} adds virtual tokens, which have no position in a forest; use LoRA"
        )
    tuner = model.base_model
    if isinstance(tuner, nn.Module):
        _check_passes_nothing(tuner)
        _check_compiled_elsewhere(tuner)
    inner: nn.Module = model.get_base_model()
    return inner


def _check_passes_nothing(tuner: nn.Module) -> None:
    """Refuse adapters whose layers need inputs that the outer forward computes, such as tasks or gates."""
    forward = type(tuner).forward
    if forward.__module__ != "peft.tuners.tuners_utils":
        raise UnsupportedError(
            f"PEFT method {type(tuner).__name__} has its own forward around the model, which the tree step does "
            "not call, so its adapters or its loss would be wrong; use LoRA"
        )


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters that are not known to compute each token independently and without noise.

    Lily averages its router over the batch, PVeRA and MonteCLoRA draw noise, VeLoRA projects on the mean of a batch.

    Args:
        model: model with its adapters inside, added by a PeftModel, `add_adapter` or a caller.

    Raises:
        UnsupportedError: an adapter's method or variant; names it and its module.
    """
    for name, module in model.named_modules():
        variants = (type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values())
        layer = _unknown_adapter(type(module))  # type: ignore[arg-type]
        unknown = [*layer, *(variant for variant in variants if variant not in LORA_VARIANTS)]
        if unknown:
            raise UnsupportedError(
                f"the adapter {unknown[0]} at {name!r} may compute a token by the rest of the batch or by noise, and a "
                "tree computes a shared token once; use plain LoRA, or another method that docs/models.md lists"
            )


@cache
def _unknown_adapter(kind: type) -> tuple[str, ...]:
    """Return the name of an adapter layer that is not in `ADAPTERS`; empty for any other module."""
    module = kind.__module__.split(".")
    is_adapter = any(base.__name__ == "BaseTunerLayer" for base in kind.__mro__)
    if not is_adapter or (module[:2] == ["peft", "tuners"] and module[2] in ADAPTERS):
        return ()
    return (f"{module[2]} of PEFT" if module[:2] == ["peft", "tuners"] else kind.__qualname__,)


def _check_compiled_elsewhere(model: nn.Module) -> None:
    if model._compiled_call_impl is not None:
        raise UnsupportedError(
            f"{type(model).__name__}.compile() compiles a forward that the tree step does not call; compile its layers "
            "in place, `for layer in model.model.layers: layer.compile()`, or wrap it, `torch.compile(model)`"
        )


def _as_it_is(part: Callable[..., Any]) -> Callable[..., Any]:
    return part
