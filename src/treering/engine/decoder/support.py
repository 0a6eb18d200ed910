"""Rejects models that the engine would not compute exactly: it reads weights instead of calling the model.

By what the model consists of, and once, before the first rollout, by its logits.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from treering.engine.batch.token_batch import of_sequence
from treering.engine.decoder.adapters import check_adapter, plain_of
from treering.engine.decoder.protocol import Decoder
from treering.errors import StateError, UnsupportedError
from treering.model.checks import check_whole
from treering.model.families import ModelParts

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported values of `config.model_type`, with full attention only; fewer than the tree step trains."""

FAMILIES_IN_PICTURE_MODELS = ("qwen2_5_vl_text", "qwen3_vl_text")
"""As `FAMILIES`, of the language models inside of models that take pictures; InternVL's are among `FAMILIES`."""


_MOST_TOKENS = 6


# Far above rounding (1e-6, and 1e-2 in 16 bits) and far below the effect of a missing bias or norm.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}


_TOLERANCE_16_BITS = 0.1


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


def check_decoder(model: nn.Module, decoder: Decoder, *, vocab_size: int, max_context: int) -> None:
    """Runs a few tokens, at most `max_context`, through model and decoder and compares the logits.

    Raises:
        StateError: the model's own logits hold NaN or +inf.
        UnsupportedError: the logits differ by more than rounding: a layer has a hook, an adapter or its own forward.
    """
    tokens = np.arange(min(_MOST_TOKENS, max_context), dtype=np.int64) * 7919 % vocab_size
    expected = _model_logits(model, torch.from_numpy(tokens))
    if bool((expected.isnan() | expected.isposinf()).any()):
        raise StateError(
            f"an engine samples from finite logits, and those of {type(model).__name__} hold NaN or +inf: its weights "
            "have diverged or are not loaded; go back to a checkpoint before it"
        )
    actual = decoder.run(of_sequence(tokens)).to(expected)
    # -inf in both counts as equal; -inf in one gives an infinite error.
    differences = torch.where(actual == expected, 0.0, actual - expected)
    error = float(differences.norm() / expected[expected.isfinite()].norm().clamp_min(1e-30))
    if not error <= _TOLERANCE.get(expected.dtype, _TOLERANCE_16_BITS):
        raise UnsupportedError(
            f"the engine reads a model's weights and computes {type(model).__name__} itself, but the logits differ "
            f"by {error:.1e}: a layer has a hook, an adapter or a forward of its own; remove or merge it"
        )


def _model_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens[None].to(device), use_cache=False).logits[0]
    finally:
        for module, mode in modes.items():
            module.training = mode
    return logits
