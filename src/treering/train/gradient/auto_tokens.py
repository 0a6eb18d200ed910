"""How many tokens a step computes at one time by itself: what the device's free memory holds, halved if it does not."""

import warnings
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from treering.model.families import ModelParts
from treering.model.layers import Layers, layers_of
from treering.train.gradient.activations import bytes_per_token, free_memory

MaxTokens: TypeAlias = int | Literal["auto"] | None
"""Most distinct tokens that are computed at one time; "auto" goes by free memory, None sets no limit."""

DEFAULT_TOKENS = 16_384
"""What "auto" is on a CPU, where memory is seldom short, and on several ranks, which plan alike."""

LEAST_TOKENS = 256
"""Below it an out-of-memory error is passed on: the weights themselves leave no room."""

_HEAD_SHARE = 1 / 4
"""Share of the free memory that is left to logits and temporaries."""

_OPTIMIZER_BYTES = 8
"""Bytes per trained number that AdamW will take in float32, once the first step has ended."""

_BUDGETS: WeakKeyDictionary[nn.Module, dict[Layers, int]] = WeakKeyDictionary()
"""Found once for a model and the way its layers run, so that its steps are planned alike, and lowered where that was
too much."""

T = TypeVar("T")


def tokens_that_fit(parts: ModelParts) -> int:
    """The largest number of tokens whose activations fit into free memory; call it inside `tree_attention`.

    Measured for a model once; `DEFAULT_TOKENS` if its decoder is frozen and saves nothing. Left free are gradients that
    do not exist yet, AdamW's state, and a share for logits.

    Example: 40 GB free and 1 MB a token give 30,000 tokens for a model whose weights are frozen.
    """
    if parts.device.type != "cuda":
        return DEFAULT_TOKENS
    budgets, layers = _BUDGETS.setdefault(parts.decoder, {}), layers_of(parts.decoder)
    if layers not in budgets:
        budgets[layers] = _measured(parts)
    return budgets[layers]


def run_by_memory(parts: ModelParts, weights: Iterable[Tensor], run: Callable[[int], T], first: Callable[[], int]) -> T:
    """Runs a step with as many tokens at a time as fit, and again with half of them where memory runs out.

    Args:
        parts: of the model.
        weights: whose gradients the step adds; those that had none have none when it starts again.
        run: the step, by the number of tokens.
        first: the number to begin with.

    Raises:
        torch.OutOfMemoryError: with `LEAST_TOKENS`, or where gradients of earlier steps would be lost.

    Warns:
        RuntimeWarning: memory ran out, with both numbers.
    """
    weights, tokens = list(weights), first()
    had_gradients = any(weight.grad is not None for weight in weights)
    while True:
        try:
            return run(tokens)
        except torch.OutOfMemoryError as error:
            # The traceback holds the frames, and so the tensors, of the failed step.
            failure = error.with_traceback(None)
        if had_gradients or tokens <= LEAST_TOKENS:
            raise failure
        for weight in weights:
            weight.grad = None
        if parts.device.type == "cuda":
            torch.cuda.empty_cache()
        _BUDGETS.setdefault(parts.decoder, {})[layers_of(parts.decoder)] = tokens // 2
        warnings.warn(
            f"memory ran out with {tokens:,} tokens at a time, so the step runs again with {tokens // 2:,}, as will "
            "later ones; a smaller number from the start, instead of auto, saves the attempt",
            RuntimeWarning,
            stacklevel=3,
        )
        tokens //= 2


def _measured(parts: ModelParts) -> int:
    each = bytes_per_token(parts)
    if each == 0:
        return DEFAULT_TOKENS
    free, _ = free_memory(parts.device)
    trained = [weight for weight in parts.decoder.parameters() if weight.requires_grad]
    to_come = sum(weight.numel() * (_OPTIMIZER_BYTES + weight.element_size()) for weight in trained)
    return max(LEAST_TOKENS, int((free * (1 - _HEAD_SHARE) - to_come) / each))
