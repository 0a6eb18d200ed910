"""A snapshot of a model's weights for the decoders, with projections that share an input fused into one matrix.

The snapshot is the policy of one version: training updates the model, and the snapshot changes only with `read`.

    L layers   C hidden size   H query heads   G key-value heads   D head size   F MLP size   V vocabulary   P positions
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treering.engine.decoder.adapters import WeightSource, bias_of, source_of
from treering.engine.decoder.support import check_runnable
from treering.model.families import ModelParts
from treering.types import ModelShape


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


def activation_widths(sizes: Sizes | ModelShape) -> dict[str, int]:
    """Numbers per token of what a fused pass keeps of a layer, by name and in the order in which it is computed.

    Example: Qwen3-8B has 4,096 in "x", "h" and "update", 6,144 in "qkv" and 59,392 in all.
    """
    heads = sizes.num_heads * sizes.head_size
    return {
        **dict.fromkeys(("x", "h", "update"), sizes.hidden_size),
        "qkv": heads + 2 * sizes.num_kv_heads * sizes.head_size,
        "attended": heads,
        "gate_up": 2 * sizes.intermediate_size,
        "gated": sizes.intermediate_size,
    }


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
    axes: Tensor  # int64 [D]: which of time, height and width each entry of a head rotates by

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of the snapshot: the model's."""
        return self.embedding.device

    def read(self, parts: ModelParts) -> None:
        """Copies the model's current weights into the snapshot, LoRA added."""
        # Tensors of an engine created in inference mode can be written only in inference mode.
        with torch.inference_mode():
            for target, sources in zip(_flat(self), _sources(parts), strict=True):
                for part, source in zip(_split(target, sources), sources, strict=True):
                    source.fill(part)

    def is_current(self, parts: ModelParts) -> bool:
        """Whether `read` would change nothing; takes the memory of one matrix."""
        with torch.inference_mode():
            for target, sources in zip(_flat(self), _sources(parts), strict=True):
                for part, source in zip(_split(target, sources), sources, strict=True):
                    fresh = torch.empty_like(part)
                    source.fill(fresh)
                    if not torch.equal(fresh, part):
                        return False
        return True


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
        flat = [_fused(sources) for sources in _sources(parts)]
        cos, sin = _rotations(parts, num_positions)
        axes = _axes(parts)
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
        axes=axes,
    )


def _fused(sources: tuple[WeightSource, ...]) -> Tensor:
    """A new matrix of the sources' rows, one source after another."""
    first = sources[0].weight
    fused = first.new_empty((sum(source.weight.shape[0] for source in sources), *first.shape[1:]))
    for part, source in zip(_split(fused, sources), sources, strict=True):
        source.fill(part)
    return fused


def _split(fused: Tensor, sources: tuple[WeightSource, ...]) -> tuple[Tensor, ...]:
    """The rows of each source, as views."""
    return torch.split(fused, [source.weight.shape[0] for source in sources])


def _layer_sources(layer: Any) -> dict[str, tuple[WeightSource, ...] | None]:
    """The model's weights for each field of `LayerWeights`, in its order."""
    attention, mlp = layer.self_attn, layer.mlp
    queries = (attention.q_proj, attention.k_proj, attention.v_proj)
    gates = (mlp.gate_proj, mlp.up_proj)
    return {
        "input_norm": (source_of(layer.input_layernorm),),
        "qkv": tuple(source_of(projection) for projection in queries),
        "qkv_bias": _biases(*queries),
        "q_norm": _norm_of(attention, "q_norm"),
        "k_norm": _norm_of(attention, "k_norm"),
        "out": (source_of(attention.o_proj),),
        "out_bias": _biases(attention.o_proj),
        "mlp_norm": (source_of(layer.post_attention_layernorm),),
        "gate_up": tuple(source_of(projection) for projection in gates),
        "gate_up_bias": _biases(*gates),
        "down": (source_of(mlp.down_proj),),
        "down_bias": _biases(mlp.down_proj),
    }


def _take_layer(layer: nn.Module, tensors: Iterator[Tensor]) -> LayerWeights:
    sources = _layer_sources(layer)
    fields: dict[str, Any] = {name: None if source is None else next(tensors) for name, source in sources.items()}
    return LayerWeights(**fields)


def _sources(parts: ModelParts) -> list[tuple[WeightSource, ...]]:
    """The model's weights in the snapshot's order; each tuple is fused into one matrix."""
    decoder: Any = parts.decoder
    layers = [sources for layer in parts.layers for sources in _layer_sources(layer).values() if sources is not None]
    bias = _biases(parts.head)
    last = [(source_of(parts.head),), *([] if bias is None else [bias])]
    return [(source_of(parts.embedding),), *layers, (source_of(decoder.norm),), *last]


def _flat(weights: DecoderWeights) -> list[Tensor]:
    layers = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    every = [weights.embedding, *layers, weights.norm, weights.head, weights.head_bias]
    return [tensor for tensor in every if tensor is not None]


def _biases(*projections: nn.Module) -> tuple[WeightSource, ...] | None:
    biases = [bias_of(projection) for projection in projections]
    return None if biases[0] is None else tuple(WeightSource(bias) for bias in biases if bias is not None)


def _norm_of(attention: nn.Module, name: str) -> tuple[WeightSource, ...] | None:
    norm: Any = getattr(attention, name, None)
    return None if norm is None else (source_of(norm),)


def _rotations(parts: ModelParts, num_positions: int) -> tuple[Tensor, Tensor]:
    """RoPE cosines and sines from the model's own module, so that any scaling is supported."""
    table = source_of(parts.embedding).weight
    decoder: Any = parts.decoder
    positions = torch.arange(num_positions, device=table.device)[None]
    cos, sin = decoder.rotary_emb(table[:1, None], positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _axes(parts: ModelParts) -> Tensor:
    """The axis of each entry of a head, from what the model's own module makes of a step along each; 0 without axes."""
    table = source_of(parts.embedding).weight
    layer: Any = parts.layers[0]
    if parts.vision is None or parts.vision.merge is None:
        return torch.zeros(int(layer.self_attn.head_dim), dtype=torch.int64, device=table.device)
    decoder: Any = parts.decoder
    steps = torch.eye(3, dtype=torch.int64, device=table.device)
    sines = [decoder.rotary_emb(table[:1, None].float(), step[:, None, None])[1][0, 0] for step in steps]
    return torch.stack(sines).abs().argmax(0)


def _sizes(parts: ModelParts, num_positions: int) -> Sizes:
    layer: Any = parts.layers[0]
    head_size = int(layer.self_attn.head_dim)
    table = source_of(parts.embedding).weight
    return Sizes(
        num_layers=len(parts.layers),
        hidden_size=int(table.shape[1]),
        num_heads=source_of(layer.self_attn.q_proj).weight.shape[0] // head_size,
        num_kv_heads=source_of(layer.self_attn.k_proj).weight.shape[0] // head_size,
        head_size=head_size,
        intermediate_size=int(source_of(layer.mlp.gate_proj).weight.shape[0]),
        vocab_size=parts.vocab_size,
        num_positions=num_positions,
        eps=float(parts.config.rms_norm_eps),
    )
