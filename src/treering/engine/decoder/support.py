"""Rejects models that the engine would not compute exactly: it reads weights instead of calling the model."""

from typing import Any

from torch import nn

from treering.engine.decoder.adapters import check_adapter, plain_of
from treering.errors import UnsupportedError
from treering.model.checks import check_whole
from treering.model.families import ModelParts

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported values of `config.model_type`, with full attention only; fewer than the tree step trains."""

FAMILIES_IN_PICTURE_MODELS = ("qwen2_5_vl_text", "qwen3_vl_text")
"""As `FAMILIES`, of the language models inside of models that take pictures; InternVL's are among `FAMILIES`."""


def check_runnable(parts: ModelParts) -> None:
    """Rejects a model that a fused pass over its weights would not reproduce.

    Raises:
        UnsupportedError: names the unsupported family, window, projection, activation or head.
    """
    check_whole(parts, "the engine")
    _check_family(parts)
    _check_modules(parts)
    _check_head(parts)


def _check_family(parts: ModelParts) -> None:
    _check_recurrence(parts)
    families = FAMILIES if parts.vision is None else (*FAMILIES, *FAMILIES_IN_PICTURE_MODELS)
    if parts.config.model_type not in families:
        raise UnsupportedError(
            f"the engine runs {', '.join(families)}, and this model is {parts.config.model_type!r}; use vLLM for its "
            "rollouts"
        )
    for index, layer in enumerate(parts.layers):
        window = _window(layer, parts.config)
        if window is not None:
            raise UnsupportedError(
                f"layer {index} sees a window of {window} positions, and the engine runs full attention; use vLLM for "
                "this model's rollouts"
            )


def _check_recurrence(parts: ModelParts) -> None:
    for index, layer in enumerate(parts.layers):
        for mixer in parts.mixers:
            if any(module is mixer for module in layer.modules()):
                raise UnsupportedError(
                    f"layer {index} is recurrent, a {type(mixer).__name__}: its state cannot un-see a rejected draft, "
                    f"and the engine keeps keys and values alone; use vLLM for the rollouts of this "
                    f"{parts.config.model_type!r} model"
                )


def _window(layer: Any, config: Any) -> int | None:
    """The layer's window: Mistral's is in the configuration; Qwen's configuration may name one that no layer uses."""
    window: int | None = (
        config.sliding_window if config.model_type == "mistral" else getattr(layer.self_attn, "sliding_window", None)
    )
    return window


def _check_modules(parts: ModelParts) -> None:
    activation = parts.config.hidden_act
    if activation != "silu":
        raise UnsupportedError(
            f"the engine computes MLPs with silu, and this model has {activation!r}; use vLLM for it"
        )
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for index, layer in enumerate(parts.layers):
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] not in projections:
                continue
            if type(plain_of(module)) is not nn.Linear:
                raise UnsupportedError(
                    f"layer {index}: {name} is a {type(module).__name__}, and the engine reads linear layers, plain or "
                    "with LoRA; merge other adapters and undo quantisation first"
                )
            check_adapter(module, f"layer {index}: {name}")


def _check_head(parts: ModelParts) -> None:
    if type(plain_of(parts.head)) is not nn.Linear:
        raise UnsupportedError(
            f"the head is a {type(parts.head).__name__}, and the engine reads a linear layer, plain or with LoRA; "
            "merge other adapters first"
        )
    if type(plain_of(parts.embedding)) is not nn.Embedding:
        raise UnsupportedError(
            f"the embedding is a {type(parts.embedding).__name__}, and the engine reads a plain table, or one with "
            "LoRA; merge other adapters first"
        )
    for name, module in (("the head", parts.head), ("the embedding", parts.embedding)):
        check_adapter(module, name)
    num_rows, num_embedded = _num_rows(parts.head), _num_rows(parts.embedding)
    if num_rows > num_embedded:
        raise UnsupportedError(
            f"every sampled token is embedded next, and the head has {num_rows} rows where the embedding has "
            f"{num_embedded}; resize the embedding to the head"
        )


def _num_rows(module: Any) -> int:
    weight: Any = plain_of(module).weight
    return int(weight.shape[0])
