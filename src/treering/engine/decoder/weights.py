"""A snapshot of a model's weights for the decoders, with projections that share an input fused into one matrix.

The snapshot is the policy of one version: training updates the model, and the snapshot changes only with `read`.

    L layers   C hidden size   H query heads   G key-value heads   D head size   F MLP size   V vocabulary   P positions
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treering.engine.decoder.support import check_runnable
from treering.model.families import ModelParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model's dimensions, and the epsilon of the norms."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    num_positions: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer; matrices are [out, in] as in torch, absent biases and norms are None."""

    input_norm: Tensor  # [C]
    qkv: Tensor  # [(H + 2 G) D, C]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [C, H D]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [C]
    gate_up: Tensor  # [2 F, C]
    gate_up_bias: Tensor | None
    down: Tensor  # [C, F]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    """All weights of a forward pass."""

    sizes: Sizes
    embedding: Tensor  # [V, C]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [C]
    head: Tensor  # [V, C]
    head_bias: Tensor | None
    cos: Tensor  # [P, D]
    sin: Tensor  # [P, D]

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of the snapshot: the model's."""
        return self.embedding.device

    def read(self, parts: ModelParts) -> None:
        """Copies the model's current weights into the snapshot."""
        fresh = _tensors(parts)
        # Tensors of an engine created in inference mode can be written only in inference mode.
        with torch.inference_mode():
            for target, sources in zip(_flat(self), fresh, strict=True):
                offset = 0
                for source in sources:
                    target[offset : offset + source.shape[0]].copy_(source)
                    offset += source.shape[0]


def read_weights(parts: ModelParts, *, num_positions: int) -> DecoderWeights:
    """Makes a snapshot of a model of the supported families.

    Args:
        parts: from `find_parts`.
        num_positions: P, longest sequence to run.

    Raises:
        UnsupportedError: names the projection, activation or norm that a fused pass would not reproduce.
    """
    check_runnable(parts)
    with torch.no_grad():
        flat = [torch.cat(sources) if len(sources) > 1 else sources[0].clone() for sources in _tensors(parts)]
        cos, sin = _rotations(parts, num_positions)
    tensors = iter(flat)
    embedding = next(tensors)
    layers = tuple(_take_layer(layer, tensors) for layer in parts.layers)
    norm, head = next(tensors), next(tensors)
    return DecoderWeights(
        sizes=_sizes(parts, num_positions),
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        head_bias=next(tensors, None),
        cos=cos,
        sin=sin,
    )


def _layer_sources(layer: Any) -> dict[str, tuple[Tensor, ...] | None]:
    """The model's tensors for each field of `LayerWeights`, in its order."""
    attention, mlp = layer.self_attn, layer.mlp
    queries = (attention.q_proj, attention.k_proj, attention.v_proj)
    gates = (mlp.gate_proj, mlp.up_proj)
    return {
        "input_norm": (layer.input_layernorm.weight,),
        "qkv": tuple(projection.weight for projection in queries),
        "qkv_bias": _biases(*queries),
        "q_norm": _norm_of(attention, "q_norm"),
        "k_norm": _norm_of(attention, "k_norm"),
        "out": (attention.o_proj.weight,),
        "out_bias": _biases(attention.o_proj),
        "mlp_norm": (layer.post_attention_layernorm.weight,),
        "gate_up": tuple(projection.weight for projection in gates),
        "gate_up_bias": _biases(*gates),
        "down": (mlp.down_proj.weight,),
        "down_bias": _biases(mlp.down_proj),
    }


def _take_layer(layer: nn.Module, tensors: Iterator[Tensor]) -> LayerWeights:
    sources = _layer_sources(layer)
    fields: dict[str, Any] = {name: None if source is None else next(tensors) for name, source in sources.items()}
    return LayerWeights(**fields)


def _tensors(parts: ModelParts) -> list[tuple[Tensor, ...]]:
    """The model's tensors in the snapshot's order; each tuple is fused into one matrix."""
    decoder: Any = parts.decoder
    head: Any = parts.head
    layers = [sources for layer in parts.layers for sources in _layer_sources(layer).values() if sources is not None]
    last = [(head.weight,), *([(head.bias,)] if head.bias is not None else [])]
    return [(_table(parts),), *layers, (decoder.norm.weight,), *last]


def _flat(weights: DecoderWeights) -> list[Tensor]:
    layers = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    every = [weights.embedding, *layers, weights.norm, weights.head, weights.head_bias]
    return [tensor for tensor in every if tensor is not None]


def _table(parts: ModelParts) -> Tensor:
    embedding: Any = parts.embedding
    weight: Tensor = embedding.weight
    return weight


def _biases(*projections: Any) -> tuple[Tensor, ...] | None:
    if projections[0].bias is None:
        return None
    return tuple(projection.bias for projection in projections)


def _norm_of(attention: nn.Module, name: str) -> tuple[Tensor, ...] | None:
    norm: Any = getattr(attention, name, None)
    return None if norm is None else (norm.weight,)


def _rotations(parts: ModelParts, num_positions: int) -> tuple[Tensor, Tensor]:
    """RoPE cosines and sines from the model's own module, so that any scaling is supported."""
    table = _table(parts)
    decoder: Any = parts.decoder
    positions = torch.arange(num_positions, device=table.device)[None]
    cos, sin = decoder.rotary_emb(table[:1, None], positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _sizes(parts: ModelParts, num_positions: int) -> Sizes:
    layer: Any = parts.layers[0]
    head_size = int(layer.self_attn.head_dim)
    table = _table(parts)
    return Sizes(
        num_layers=len(parts.layers),
        hidden_size=int(table.shape[1]),
        num_heads=layer.self_attn.q_proj.weight.shape[0] // head_size,
        num_kv_heads=layer.self_attn.k_proj.weight.shape[0] // head_size,
        head_size=head_size,
        intermediate_size=int(layer.mlp.gate_proj.weight.shape[0]),
        vocab_size=parts.vocab_size,
        num_positions=num_positions,
        eps=float(parts.config.rms_norm_eps),
    )
