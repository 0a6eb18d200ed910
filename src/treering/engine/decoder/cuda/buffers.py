"""Preallocated activations of a pass, so that it allocates nothing and can be captured in a CUDA graph.

Smaller passes use views of the same memory.

    T tokens   P parts of the keys   C hidden size   F MLP size   H query heads   G key heads   D head size
"""

from typing import NamedTuple

import torch
from torch import Tensor

from treering.engine.decoder.cuda.attention import num_parts
from treering.engine.decoder.cuda.device import num_processors
from treering.engine.decoder.cuda.passes import ROWS_OF_TILES
from treering.engine.decoder.weights import DecoderWeights, Sizes, activation_widths


class Views(NamedTuple):
    """The buffers of one pass, in the model's dtype unless noted."""

    x: Tensor  # [T, C] residual stream
    h: Tensor  # [T, C] its norm
    update: Tensor  # [T, C] to be added to x next
    qkv: Tensor  # [T, (H + 2 G) D]
    attended: Tensor  # [T, H D]
    gate_up: Tensor  # [T, 2 F]
    gated: Tensor  # [T, F]
    parts: Tensor  # float32 [P, T, H, D]
    lse: Tensor  # float32 [P, T, H]


class Buffers:
    """Buffers for passes of up to `num_tokens` tokens, which all use the same memory."""

    def __init__(self, weights: DecoderWeights, *, num_tokens: int) -> None:
        """Allocates everything but the logits, which only some passes write here."""
        sizes, device = weights.sizes, weights.device
        self._weights = weights
        self._num_tokens = num_tokens
        self._tensors = [
            torch.zeros(num_tokens, width, dtype=weights.dtype, device=device)
            for width in activation_widths(sizes).values()
        ]
        self._num_lines = _most_lines(sizes, num_tokens, num_processors(device))
        self._parts = torch.zeros(self._num_lines, sizes.num_heads, sizes.head_size, device=device)
        self._lse = torch.zeros(self._num_lines, sizes.num_heads, device=device)
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Logits of all tokens, [T, V]; allocated at first use."""
        if self._logits is None:
            head = self._weights.head
            self._logits = torch.zeros(self._num_tokens, head.shape[0], dtype=head.dtype, device=head.device)
        return self._logits

    def first(self, num_tokens: int, num_tiles: int) -> Views:
        """Views for a pass of `num_tokens` tokens in `num_tiles` tiles."""
        weights = self._weights
        shape = num_parts(num_tiles, weights.sizes.num_kv_heads, num_processors(weights.device)), num_tokens
        num_lines = shape[0] * num_tokens
        assert num_tokens <= self._num_tokens
        assert num_lines <= self._num_lines
        parts = self._parts[:num_lines].view(*shape, *self._parts.shape[1:])
        lse = self._lse[:num_lines].view(*shape, -1)
        return Views._make([*(tensor[:num_tokens] for tensor in self._tensors), parts, lse])


def _most_lines(sizes: Sizes, num_tokens: int, num_processors: int) -> int:
    """Most tokens times parts of a pass with more than `num_tokens` / 2 and up to `num_tokens` tokens."""
    # Fewer tokens mean fewer tiles, and so more parts.
    fewest_tiles = num_tokens // 2 * (sizes.num_heads // sizes.num_kv_heads) // ROWS_OF_TILES[-1]
    return num_tokens * num_parts(max(1, fewest_tiles), sizes.num_kv_heads, num_processors)
