"""Which Hugging Face models can run on a forest, and where their parts are.

A tree step is exact only if every layer treats a token by its own path. So this file lists what is known to do so and
refuses everything else by name. Knows configurations and module names; computes nothing.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from treering.errors import UnsupportedError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`config.model_type` of the supported families: full attention, RoPE, an output head that is one matrix."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The parts of a causal language model that the tree step touches.

    Attributes:
        decoder: embeddings to last hidden state (the model without its output head).
        layers: the decoder's blocks, each given `attention_mask` by keyword.
        embedding: token embedding.
        head: hidden state to logits.
        config: the configuration object that the attention modules read their implementation from.
        vocab_size: token ids must be smaller: the rows of the embedding or of the head, whichever are fewer.
    """

    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    embedding: nn.Module
    head: nn.Module
    config: PreTrainedConfig
    vocab_size: int


def find_parts(model: nn.Module) -> ModelParts:
    """The parts of a supported model, PEFT adapters included.

    Raises:
        UnsupportedError: a model, layer, position encoding or head that would not be exact, named with the reason.
    """
    causal_lm = _unwrap(model)
    config = causal_lm.config
    _check_family(config)
    _check_positions(config)
    _check_output(causal_lm)
    head = causal_lm.get_output_embeddings()
    _check_head(head, config)
    decoder = causal_lm.get_decoder()
    embedding = causal_lm.get_input_embeddings()
    return ModelParts(
        decoder=decoder,
        layers=tuple(decoder.layers),
        embedding=embedding,
        head=head,
        config=config,
        vocab_size=min(_num_rows(embedding), _num_rows(head)),
    )


def check_no_dropout(model: nn.Module) -> None:
    """Refuses active dropout: a shared token would get one mask where its branches, trained apart, get several.

    Raises:
        UnsupportedError: a training-mode dropout with p > 0, named.
    """
    for name, module in model.named_modules():
        if module.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedError(
                f"dropout {name!r} has p={module.p} in training mode: set it to 0 or call model.eval()"
            )
        rate = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
        if isinstance(rate, float) and rate > 0:
            raise UnsupportedError(f"{name!r} has attention_dropout={rate} in training mode: set it to 0 in the config")


def _unwrap(model: nn.Module) -> PreTrainedModel:
    if hasattr(model, "get_base_model"):
        adapter = getattr(model, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedError(
                f"PEFT method {type(adapter).__name__} adds virtual tokens, which have no place in a forest: use LoRA"
            )
        unwrap: Any = model.get_base_model
        model = unwrap()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"tree attention needs a Hugging Face causal language model or a PEFT model of one, got "
            f"{type(model).__name__}: pass the model inside the wrapper"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"{type(model).__name__} has no output head: load it with AutoModelForCausalLM")
    return model


def _check_family(config: PreTrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"model type {config.model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind != "full_attention":
            raise UnsupportedError(f"layer {index} is {kind!r}: only full_attention layers are supported")
    if config.model_type == "mistral" and config.sliding_window is not None:
        raise UnsupportedError(
            f"sliding_window={config.sliding_window} (layer type sliding_attention) is not supported: only "
            "full_attention layers are; set sliding_window=None if no path is longer than the window"
        )


def _check_positions(config: PreTrainedConfig) -> None:
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedError(
            f"rope_type {rope_type!r} scales with the length of the batch, so a token's rotation would depend on "
            "other branches: use default, linear, yarn or llama3"
        )


def _check_output(causal_lm: PreTrainedModel) -> None:
    """Logits are computed here from hidden states, so what a model does to them in its own `forward` would be lost."""
    name = type(causal_lm).__name__
    stock = MODEL_FOR_CAUSAL_LM_MAPPING[type(causal_lm.config)]
    if type(causal_lm).forward is not stock.forward:
        raise UnsupportedError(
            f"{name} has a forward of its own, whose output transform would be left out: use {stock.__name__}"
        )
    if causal_lm._forward_hooks or causal_lm._forward_pre_hooks:
        raise UnsupportedError(
            f"{name} has a forward hook, which would not run on a forest: remove it, or hook its decoder or its head"
        )


def _num_rows(table: nn.Module) -> int:
    return int(_inner(table).weight.shape[0])


def _inner(module: nn.Module) -> Any:
    """The module that an adapter of PEFT stands before (LoRA, or a trained copy), or the module itself."""
    return getattr(module, "base_layer", getattr(module, "original_module", module))


def _check_head(head: nn.Module, config: PreTrainedConfig) -> None:
    if not isinstance(_inner(head), nn.Linear):
        raise UnsupportedError(
            f"output head {type(head).__name__} of model type {config.model_type!r} is not a plain linear layer"
        )
