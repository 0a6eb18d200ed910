"""Define the decoder protocol and the plain decoder: torch operations on gathered keys and values, for any device.

A pass computes tokens of many rollouts, each with its own view of the key-value arena. A token attends to a prefix span
(a prompt that rollouts share) and to its rollout's own span up to itself; a token of a draft tree finds its ancestors
there by a bit mask. Decode steps, draft tokens and prefill chunks are handled alike: tokens with a position, a slot to
write and slots to read. The plain decoder is the specification of the fused ones.

    T tokens of a pass   W tokens whose logits are wanted   S slots   V vocabulary
    K slots that move, or a token's view   C hidden size   H query heads   G key-value heads   D head size
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import ImageInputs, TokenBatch
from treering.engine.decoder.decoder_weights import DecoderWeights, LayerWeights


class Decoder(ABC):
    """Decoder with weights, a key-value arena of S slots, and a spare slot."""

    @property
    @abstractmethod
    def spare_slot(self) -> int:
        """Slot outside the arena; values written there are never used."""

    @abstractmethod
    def run(self, batch: TokenBatch) -> Tensor:
        """Write keys and values of all tokens and return logits [W, V] in the model's dtype.

        The result is valid until the next run.
        """

    @abstractmethod
    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy the keys and values of slots `sources` to slots `targets`, both int64 [K], in every layer, in order.

        Targets are unique. A slot may be both source and target if it is a source first.

        Example: if slots 3, 4, 5 hold c, d, e, moving [4, 5] to [3, 4] leaves d, e, e.
        """


class TorchDecoder(Decoder):
    """Decoder in plain torch; a layer takes O(T K) memory, so use it for short contexts and for comparison."""

    def __init__(self, weights: DecoderWeights, num_slots: int) -> None:
        """Allocate an arena of `num_slots` and a spare slot on the weights' device."""
        sizes = weights.sizes
        self._weights = weights
        self._num_slots = num_slots
        shape = (sizes.num_layers, num_slots + 1, sizes.num_kv_heads, sizes.head_size)
        self._keys = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        self._values = torch.zeros_like(self._keys)

    @property
    def spare_slot(self) -> int:
        """The last slot, which nothing reads."""
        return self._num_slots

    @torch.inference_mode()
    def run(self, batch: TokenBatch) -> Tensor:
        """Write the batch's keys and values and return logits [W, V]."""
        weights = self._weights
        slots, positions, tokens, wanted = (
            torch.from_numpy(array).to(weights.device)
            for array in (batch.slots, batch.positions, batch.tokens, batch.wanted)
        )
        views, visible = (torch.from_numpy(array).to(weights.device) for array in _views(batch))
        images = batch.images
        at = None if images is None else torch.from_numpy(images.at).to(weights.device)
        levels = () if images is None else images.levels
        rotation = self._rotation(positions, images)
        x = weights.embedding[tokens]
        if levels:
            x[at] = levels[0].to(x.dtype)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, x, rotation)
            self._keys[index, slots] = k
            self._values[index, slots] = v
            attended = _attend(q, self._keys[index, views], self._values[index, views], visible)
            x = x + functional.linear(attended, layer.out, layer.out_bias)
            x = x + _mlp(layer, _norm(x, layer.mlp_norm, weights.sizes.eps))
            if index + 1 < len(levels):
                x[at] += levels[index + 1].to(x.dtype)
        x = _norm(x[wanted], weights.norm, weights.sizes.eps)
        return functional.linear(x, weights.head, weights.head_bias)

    @torch.inference_mode()
    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy keys and values between slots; read all sources before writing any target."""
        source, target = (torch.from_numpy(slots).to(self._weights.device) for slots in (sources, targets))
        for arena in (self._keys, self._values):
            arena[:, target] = arena[:, source]

    def _rotation(self, positions: Tensor, images: ImageInputs | None) -> tuple[Tensor, Tensor]:
        weights = self._weights
        if images is None:
            return weights.cos[positions][:, None], weights.sin[positions][:, None]
        # Each entry of a head rotates by the position along its axis.
        rotary = torch.from_numpy(images.rotary).to(weights.device)[weights.axes].T
        return weights.cos.gather(0, rotary)[:, None], weights.sin.gather(0, rotary)[:, None]

    def _project(self, layer: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        sizes = self._weights.sizes
        h = _norm(x, layer.input_norm, sizes.eps)
        qkv = functional.linear(h, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, sizes.head_size)
        q, k, v = torch.split(qkv, [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _norm(q, layer.q_norm, sizes.eps), _norm(k, layer.k_norm, sizes.eps)
        return _rotate(q, rotation), _rotate(k, rotation), v


def _views(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible slots of each token, int64 [T, K], and the mask of valid entries, bool [T, K]."""
    num_seen = batch.num_prefix + batch.num_own
    entry = np.arange(int(num_seen.max(initial=1)))[None]
    in_prefix = entry < batch.num_prefix[:, None]
    own = batch.own_start[:, None] + entry - batch.num_prefix[:, None]
    visible = entry < num_seen[:, None]
    slots = np.where(in_prefix, batch.prefix_start[:, None] + entry, own)
    if batch.tree_bits.any():
        bit = np.arange(64)[None]
        slots = np.concatenate([slots, batch.tree_start[:, None] + bit], 1)
        visible = np.concatenate([visible, (batch.tree_bits[:, None] >> bit) % 2 == 1], 1)
    return np.where(visible, slots, batch.slots[:, None]), visible


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attend with queries [T, H, D] over keys and values [T, K, G, D]; return [T, H D]."""
    num_tokens, num_heads, head_size = q.shape
    grouped = q.reshape(num_tokens, k.shape[2], -1, head_size)
    scores = torch.einsum("tghd,tkgd->tghk", grouped, k) / head_size**0.5
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
    return torch.einsum("tghk,tkgd->tghd", weights, v).reshape(num_tokens, num_heads * head_size)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _mlp(layer: LayerWeights, h: Tensor) -> Tensor:
    gate, up = functional.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)
