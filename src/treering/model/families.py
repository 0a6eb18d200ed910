"""Which Hugging Face models can run on a forest, and where their parts are.

A tree step is exact only if every layer computes a token from its own path alone. This file lists the models known to
do so and refuses everything else by name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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
from treering.model.pictures import PictureFeatures, VisionPart, find_vision
from treering.model.wrappers import unwrap
from treering.ranks.refusals import check_parallel
from treering.ranks.shards import Shards, find_shards
from treering.ranks.units import units_of

_MIXERS = {
    "qwen3_next": "linear_attn",
    "qwen3_5_text": "linear_attn",
    "qwen3_5_moe_text": "linear_attn",
    "bamba": "mamba",
}
"""The attribute of a block that holds its recurrent layer, for families that have such layers."""

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe"),
    *("phi3", "granite", "olmo2", "smollm3", "glm4"),
    *_MIXERS,
    *("qwen2_5_vl_text", "qwen3_vl_text"),
)
"""`config.model_type` of the supported families: full and sliding attention, Gated DeltaNet and Mamba-2 layers, RoPE, a
head that is one matrix."""

RECURRENT_SINCE = (5, 15)
"""The first transformers whose recurrent layers hand their inputs to `Cache.update_conv_state` and read them back."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
_RECURRENT = "linear_attention"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The parts of a causal language model that the tree step touches.

    Attributes:
        decoder: embeddings to last hidden state (the model without its output head).
        run: calls the decoder, compiled if the model was, inside the units that shard it.
        layers: the decoder's blocks, each called with `attention_mask` by keyword.
        mixers: the recurrent layers inside blocks (Gated DeltaNet, Mamba-2), in order.
        embedding: token embedding.
        head: hidden state to logits.
        softcap: bound that the model applies to its head's logits; None without one.
        logit_divisor: number that the model divides its head's logits by (Granite); 1 elsewhere.
        config: the configuration object that the attention modules read their implementation from.
        vocab_size: token ids must be smaller: the rows of the embedding or of the head, whichever are fewer.
        num_logits: rows of the head, unused ones at its end included.
        device: where the model computes.
        shards: the units of `fully_shard`; None for a model that is not sharded.
        vision: the part that takes pictures; None for a model of text.
        features: of the pictures of a step, computed before; None computes them in each pass.
    """

    decoder: nn.Module
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
    shards: Shards | None = None
    vision: VisionPart | None = None
    features: PictureFeatures | None = None

    @property
    def sees_whole_pictures(self) -> bool:
        """Whether a picture's tokens see all of that picture."""
        return self.vision is not None and self.vision.sees_whole_pictures


def find_parts(model: nn.Module, *, calls_modules: bool = False) -> ModelParts:
    """The parts of a supported model, PEFT adapters included.

    Args:
        model: with its adapters and its compiler's wrapper.
        calls_modules: see `check_parallel`.

    Raises:
        UnsupportedError: a model, layer, position encoding or head that would not be exact, with the reason.
    """
    check_parallel(model, units_of(model), calls_modules=calls_modules)
    compile_part, inner = unwrap(model)
    causal_lm = _as_causal_lm(inner)
    vision = find_vision(causal_lm)
    decoder = causal_lm.get_decoder()
    config = causal_lm.config if vision is None else decoder.config
    _check_family(config)
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
    return ModelParts(
        decoder=decoder,
        run=run,
        layers=tuple(decoder.layers),
        mixers=tuple(_mixers(decoder.layers, config)),
        embedding=embedding,
        head=head,
        softcap=getattr(config, "final_logit_softcapping", None) if vision is None else None,
        logit_divisor=float(getattr(config, "logits_scaling", 1.0)),
        config=config,
        vocab_size=min(_num_rows(embedding), _num_rows(head)),
        num_logits=_num_rows(head),
        device=next(embedding.parameters()).device if shards is None else shards.device,
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
        raise UnsupportedError(f"{type(model).__name__} has no output head: load it with AutoModelForCausalLM")
    return model


def _holds_module(model: nn.Module) -> bool:
    """Whether the model is a wrapper of DDP's kind, which holds the model inside as `module`."""
    return "module" in model._modules


def _check_family(config: PreTrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"model type {config.model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    if config.model_type in _MIXERS and transformers_release() < RECURRENT_SINCE:
        raise UnsupportedError(
            f"model type {config.model_type!r} has recurrent layers, which need transformers "
            f"{'.'.join(map(str, RECURRENT_SINCE))} or newer, got {transformers.__version__}: upgrade transformers"
        )
    supported = (*_LAYER_TYPES, _RECURRENT) if config.model_type in _MIXERS else _LAYER_TYPES
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in supported:
            raise UnsupportedError(f"layer {index} is {kind!r}: supported are {', '.join(supported)}")


def transformers_release() -> tuple[int, ...]:
    """Major and minor version of the installed transformers."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _mixers(layers: Iterable[nn.Module], config: PreTrainedConfig) -> Iterator[nn.Module]:
    """The recurrent layer of each block that has one."""
    name = _MIXERS.get(config.model_type)
    if name is None:
        return
    for layer in layers:
        mixer = getattr(layer, name, None)
        if mixer is not None:
            yield mixer


def _check_attention(config: PreTrainedConfig) -> None:
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(
            "use_bidirectional_attention=True lets a token see what follows it, which differs from branch to branch: "
            "load a causal model"
        )
    noise = getattr(config, "router_jitter_noise", 0.0)
    if noise:
        raise UnsupportedError(
            f"router_jitter_noise={noise} would give a shared token one noise where its branches, trained apart, get "
            "several: set it to 0 in the config"
        )


def _check_positions(config: PreTrainedConfig) -> None:
    for rope_type in _rope_types(config):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"rope_type {rope_type!r} scales with the length of the batch, so a token's rotation would depend on "
                "other branches: use default, linear, yarn or llama3"
            )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """The RoPE types of the model, or of each of its layer types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [given for given in parameters.values() if isinstance(given, dict)]
    return [given.get("rope_type", "default") for given in by_layer_type or [parameters]]


def _check_output(causal_lm: PreTrainedModel) -> None:
    """Refuses a `forward` that changes logits: logits are computed from hidden states, without calling it."""
    name = type(causal_lm).__name__
    takes_pictures = getattr(causal_lm.config, "vision_config", None) is not None
    stock_models = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if takes_pictures else MODEL_FOR_CAUSAL_LM_MAPPING
    known = (kind for kind in type(causal_lm.config).__mro__ if kind in stock_models)
    kind = next(known, None)
    if kind is None:
        raise UnsupportedError(
            f"{name} has a configuration of its own, {type(causal_lm.config).__name__}, whose output transform is not "
            "known: use a model class of transformers"
        )
    stock = stock_models[kind]
    if type(causal_lm).forward is not stock.forward:
        raise UnsupportedError(
            f"{name} has a forward of its own, whose output transform would be left out: use {stock.__name__}"
        )


def _num_rows(table: nn.Module) -> int:
    weight = _inner(table).weight
    # What ZeRO-3 has partitioned has this shape only while it is gathered.
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _inner(module: nn.Module) -> Any:
    """The module inside a PEFT adapter (LoRA, or a trained copy), or the module itself."""
    return getattr(module, "base_layer", getattr(module, "original_module", module))


def _check_tied(config: PreTrainedConfig, embedding: nn.Module, head: nn.Module) -> None:
    """Refuses tied embeddings of which sharding has made two weights, each with half of the gradient."""
    if getattr(config, "tie_word_embeddings", False) and _inner(embedding).weight is not _inner(head).weight:
        raise UnsupportedError(
            "tied embeddings are one weight, and fully_shard has made two of them in different units: shard the layers "
            "and then the whole model, `for layer in model.model.layers: fully_shard(layer)`, `fully_shard(model)`, "
            "with no unit for the decoder or the head, or untie them before"
        )


def _sharded_vision(vision: VisionPart | None, shards: Shards, *, calls_modules: bool) -> VisionPart | None:
    """The vision part where units gather its weights: inside the model's own forward, which calls modules.

    Raises:
        UnsupportedError: another caller, which would run it outside of the units around it.
    """
    if vision is None:
        return None
    if not calls_modules:
        raise UnsupportedError(
            f"fully_shard has sharded a model of type {vision.family!r}, whose vision part runs outside of the "
            "decoder's units: train it on one rank, whole on every rank (DDP), or by treering.patch, which calls the "
            "model itself"
        )
    return replace(vision, device=shards.device)


def _check_head(head: nn.Module, config: PreTrainedConfig) -> None:
    if not isinstance(_inner(head), nn.Linear):
        raise UnsupportedError(
            f"output head {type(head).__name__} of model type {config.model_type!r} is not a plain linear layer"
        )
