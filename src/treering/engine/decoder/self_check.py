"""Checks once, before the first rollout, that an engine's decoder computes the model's own logits."""

import numpy as np
import torch
from torch import nn

from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.protocol import Decoder
from treering.errors import StateError, UnsupportedError

_MOST_TOKENS = 6
# Far above rounding (1e-6, and 1e-2 in 16 bits) and far below the effect of a missing bias or norm.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BITS = 0.1


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
    actual = decoder.run(_single_sequence(tokens)).to(expected)
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


def _single_sequence(tokens: np.ndarray) -> TokenBatch:
    zeros, order = np.zeros(tokens.size, np.int64), np.arange(tokens.size)
    return TokenBatch(
        tokens=tokens,
        positions=order,
        slots=order,
        prefix_start=zeros,
        num_prefix=zeros,
        own_start=zeros,
        num_own=order + 1,
        tree_start=zeros,
        tree_bits=zeros,
        wanted=order,
    )
