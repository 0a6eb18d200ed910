"""The baseline of the engine: `model.generate` of Hugging Face, as its user would call it for rollouts.

Sampling at temperature 1 from the whole vocabulary, one call per batch, prompts padded on the left where their lengths
differ.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treering.types import TokenIds

Cache = Literal["dynamic", "static"]
CACHES: tuple[Cache, Cache] = ("dynamic", "static")
"""dynamic: the stock setting, which grows. static: preallocated, uncompiled."""

_PAD = 0


def generate(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    *,
    batch_size: int,
    max_tokens: int,
    stop_tokens: Sequence[int] = (),
    cache: Cache = "dynamic",
) -> list[TokenIds]:
    """One rollout per prompt, its stop token included, in batches of consecutive prompts; the same in every call.

    Without stop tokens every rollout has `max_tokens`.

    Example: prompts a, b, c with batch_size=2 are a call for a and b, and one for c.
    """
    rollouts: list[TokenIds] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for first in range(0, len(prompts), batch_size):
            ids, mask = _pad_left(prompts[first : first + batch_size])
            settings = _settings(max_tokens, stop_tokens, cache)
            output = model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
            rollouts += [_until_stop(row, stop_tokens) for row in output.numpy()]
    return rollouts


def _settings(max_tokens: int, stop_tokens: Sequence[int], cache: Cache) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": max_tokens,
        "pad_token_id": _PAD,
    }
    if stop_tokens:
        settings["eos_token_id"] = list(stop_tokens)
    else:
        settings["min_new_tokens"] = max_tokens
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    return settings


def _pad_left(prompts: Sequence[TokenIds]) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [K, longest] each."""
    longest = max(prompt.size for prompt in prompts)
    ids = np.full((len(prompts), longest), _PAD, np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    for i, prompt in enumerate(prompts):
        ids[i, longest - prompt.size :] = prompt
        mask[i, longest - prompt.size :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _until_stop(row: TokenIds, stop_tokens: Sequence[int]) -> TokenIds:
    """The row up to its first stop token, after which it is padding."""
    (stops,) = np.isin(row, stop_tokens).nonzero()
    return row[: stops[0] + 1] if stops.size else row
