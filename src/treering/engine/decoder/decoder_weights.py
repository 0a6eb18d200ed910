"""Take a snapshot of a model's weights for the decoders, and refuse models that they would not compute exactly.

Projections that share an input are fused into one matrix. Modules may be wrapped by PEFT: LoRA is merged while the
snapshot is filled, and the trained model is only read. The snapshot is the policy of one version: training updates
the model, and the snapshot changes only with `read`.

    L layers   C hidden size   H query heads   G key-value heads   D head size   F MLP size   V vocabulary
    P positions
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treering.errors import UnsupportedError
from treering.families import FAMILIES
from treering.model.checks import check_whole
from treering.model.tree_model import TreeModel
from treering.types import ModelShape


class WeightSource(NamedTuple):
    """Weight of the model, with the LoRA layer whose active adapters add to it."""

    weight: Tensor
    lora: Any = None

    def fill(self, target: Tensor) -> None:
        """Copy the weight plus its adapters into a tensor of the same shape.

        Adds in float32 or wider, and rounds once to the target's dtype.
        """
        if self.lora is None or not (names := active_adapters(self.lora)):
            target.copy_(self.weight)
            return
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32), copy=True)
        for name in names:
            wide += self.lora.get_delta_weight(name)
        target.copy_(wide)


def source_of(module: nn.Module) -> WeightSource:
    """Return the source of the weight of a linear layer, an embedding or a norm.

    Example: a LoRA layer around a projection is the source (projection.weight, layer).
    """
    own = _trained(module)
    return WeightSource(own.base_layer.weight, own) if is_lora(own) else WeightSource(own.weight)


def bias_of(module: nn.Module) -> Tensor | None:
    """Return the bias of a linear layer, wrapped or not."""
    own: Any = plain_of(module)
    bias: Tensor | None = own.bias
    return bias


def plain_of(module: nn.Module) -> nn.Module:
    """Return the module that has the weight: inside a LoRA layer, or the copy that PEFT trains in full.

    Example: `plain_of(nn.Linear(2, 2))` is that layer itself.
    """
    own = _trained(module)
    plain: nn.Module = own.base_layer if is_lora(own) else own
    return plain


def check_adapter(module: nn.Module, name: str) -> None:
    """Check that the adapters of a module are plain LoRA.

    Raises:
        UnsupportedError: for a variant such as DoRA, an adapter's bias, or an adapter that is both merged and disabled.
    """
    own = _trained(module)
    if not is_lora(own):
        return
    for adapter in active_adapters(own):
        variant = getattr(own, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise UnsupportedError(
                f"{name}: the engine supports plain LoRA, and adapter {adapter!r} is a "
                f"{getattr(variant, '__name__', type(variant).__name__)}; train with use_dora=False, or merge it"
            )
        if getattr(own, "lora_bias", {}).get(adapter):
            raise UnsupportedError(
                f"{name}: the engine does not read an adapter's bias, and adapter {adapter!r} has one; set "
                "lora_bias=False, or merge the adapter"
            )
    if own.merged and own.disable_adapters:
        raise UnsupportedError(f"{name}: its adapter is merged and disabled; call unmerge_adapter() first")


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is a PEFT LoRA layer."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


def active_adapters(lora: Any) -> list[str]:
    """Return the adapters that add to the base weight in a forward: none if they are disabled or already merged."""
    if lora.disable_adapters or lora.merged:
        return []
    return [name for name in lora.active_adapters if name in lora.lora_A or name in lora.lora_embedding_A]


def _trained(module: Any) -> Any:
    """Return the copy that PEFT trains in full (`modules_to_save`), or the module itself."""
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        return module
    names = [] if module.disable_adapters else list(module.active_adapters)
    return copies[names[0]] if names and names[0] in copies else module.original_module


def check_runnable(model: TreeModel) -> None:
    """Check that a fused pass over a model's weights reproduces the model.

    Raises:
        UnsupportedError: with the name of the unsupported family, window, projection, activation or head.
    """
    check_whole(model, "the engine")
    _check_family(model)
    _check_modules(model)
    _check_head(model)


def _check_family(model: TreeModel) -> None:
    _check_recurrence(model)
    fitting = ("always",) if model.vision is None else ("always", "with images")
    families = [family.model_type for family in FAMILIES.values() if family.engine in fitting]
    if model.family.model_type not in families:
        raise UnsupportedError(
            f"the engine supports {', '.join(families)}, and this model is {model.config.model_type!r}; use vLLM for "
            "its rollouts"
        )
    for index, layer in enumerate(model.layers):
        window = _window(layer, model.config)
        if window is not None:
            raise UnsupportedError(
                f"the engine supports only full attention, and layer {index} has a window of {window} positions; use "
                "vLLM for this model's rollouts"
            )


def _check_recurrence(model: TreeModel) -> None:
    for index, layer in enumerate(model.layers):
        for mixer in model.mixers:
            if any(module is mixer for module in layer.modules()):
                raise UnsupportedError(
                    f"layer {index} is recurrent, a {type(mixer).__name__}: its state cannot un-see a rejected draft, "
                    f"and the engine only keeps keys and values; use vLLM for the rollouts of this "
                    f"{model.config.model_type!r} model"
                )


def _window(layer: Any, config: Any) -> int | None:
    """Return the layer's window; Mistral's is in the configuration, and Qwen's may name one that no layer uses."""
    window: int | None = (
        config.sliding_window if config.model_type == "mistral" else getattr(layer.self_attn, "sliding_window", None)
    )
    return window


def _check_modules(model: TreeModel) -> None:
    activation = model.config.hidden_act
    if activation != "silu":
        raise UnsupportedError(
            f"the engine supports MLPs with silu, and this model has {activation!r}; use vLLM for its rollouts"
        )
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for index, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] not in projections:
                continue
            if type(plain_of(module)) is not nn.Linear:
                raise UnsupportedError(
                    f"layer {index}: {name} is a {type(module).__name__}, and the engine needs linear layers, plain or "
                    "with LoRA; merge other adapters and undo quantisation first"
                )
            check_adapter(module, f"layer {index}: {name}")


def _check_head(model: TreeModel) -> None:
    if type(plain_of(model.head)) is not nn.Linear:
        raise UnsupportedError(
            f"the head is a {type(model.head).__name__}, and the engine needs a linear layer, plain or with LoRA; "
            "merge other adapters first"
        )
    if type(plain_of(model.embedding)) is not nn.Embedding:
        raise UnsupportedError(
            f"the embedding is a {type(model.embedding).__name__}, and the engine needs a table, plain or with "
            "LoRA; merge other adapters first"
        )
    for name, module in (("the head", model.head), ("the embedding", model.embedding)):
        check_adapter(module, name)
    num_rows, num_embedded = _num_rows(model.head), _num_rows(model.embedding)
    if num_rows > num_embedded:
        raise UnsupportedError(
            f"every sampled token is embedded next, but the head has {num_rows} rows and the embedding "
            f"{num_embedded}; resize the embedding to the head"
        )


def _num_rows(module: Any) -> int:
    weight: Any = plain_of(module).weight
    return int(weight.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Dimensions of a model, and the epsilon of its norms."""

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
    """Return the numbers per token that a fused pass keeps of a layer, by name and in the order of computation.

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
    """Weights of one decoder layer; matrices are [out, in] as in torch, absent biases and norms are None."""

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
    """Weights of a forward pass."""

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
        """Device of the snapshot and the model."""
        return self.embedding.device

    def read(self, model: TreeModel) -> None:
        """Copy the model's current weights and LoRA into the snapshot."""
        # Tensors of an engine created in inference mode can be written only in inference mode.
        with torch.inference_mode():
            for target, sources in zip(_flat(self), _sources(model), strict=True):
                for part, source in zip(_split(target, sources), sources, strict=True):
                    source.fill(part)

    def is_current(self, model: TreeModel) -> bool:
        """Return whether `read` would change nothing; takes the memory of one matrix."""
        with torch.inference_mode():
            for target, sources in zip(_flat(self), _sources(model), strict=True):
                for part, source in zip(_split(target, sources), sources, strict=True):
                    fresh = torch.empty_like(part)
                    source.fill(fresh)
                    if not torch.equal(fresh, part):
                        return False
        return True


def read_weights(model: TreeModel, *, num_positions: int) -> DecoderWeights:
    """Make a snapshot of a model from a supported family.

    Args:
        model: from `TreeModel.of`.
        num_positions: P, the longest sequence to run.

    Raises:
        UnsupportedError: with the name of the projection or activation that a fused pass would not reproduce.
    """
    check_runnable(model)
    with torch.no_grad():
        flat = [_fused(sources) for sources in _sources(model)]
        cos, sin = _rotations(model, num_positions)
        axes = _axes(model)
    tensors = iter(flat)
    embedding = next(tensors)
    layers = []
    for layer in model.layers:
        fields: dict[str, Any] = {
            name: None if source is None else next(tensors) for name, source in _layer_sources(layer).items()
        }
        layers.append(LayerWeights(**fields))
    norm, head = next(tensors), next(tensors)
    return DecoderWeights(
        sizes=_sizes(model, num_positions),
        embedding=embedding,
        layers=tuple(layers),
        norm=norm,
        head=head,
        head_bias=next(tensors, None),
        cos=cos,
        sin=sin,
        axes=axes,
    )


def _fused(sources: tuple[WeightSource, ...]) -> Tensor:
    """Return a new matrix with the sources' rows, one source after another."""
    first = sources[0].weight
    fused = first.new_empty((sum(source.weight.shape[0] for source in sources), *first.shape[1:]))
    for part, source in zip(_split(fused, sources), sources, strict=True):
        source.fill(part)
    return fused


def _split(fused: Tensor, sources: tuple[WeightSource, ...]) -> tuple[Tensor, ...]:
    return torch.split(fused, [source.weight.shape[0] for source in sources])


def _layer_sources(layer: Any) -> dict[str, tuple[WeightSource, ...] | None]:
    """Return the model's weights for each field of `LayerWeights`, in its order."""
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


def _sources(model: TreeModel) -> list[tuple[WeightSource, ...]]:
    """Return the model's weights in the snapshot's order; each tuple is fused into one matrix."""
    decoder: Any = model.decoder
    layers = [sources for layer in model.layers for sources in _layer_sources(layer).values() if sources is not None]
    bias = _biases(model.head)
    last = [(source_of(model.head),), *([] if bias is None else [bias])]
    return [(source_of(model.embedding),), *layers, (source_of(decoder.norm),), *last]


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


def _rotations(model: TreeModel, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return RoPE cosines and sines from the model's own module, so that any scaling is supported."""
    table = source_of(model.embedding).weight
    decoder: Any = model.decoder
    positions = torch.arange(num_positions, device=table.device)[None]
    cos, sin = decoder.rotary_emb(table[:1, None], positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _axes(model: TreeModel) -> Tensor:
    """Return the axis that rotates each entry of a head, measured by one step along each; 0 without axes."""
    table = source_of(model.embedding).weight
    layer: Any = model.layers[0]
    if model.vision is None or model.vision.merge is None:
        return torch.zeros(int(layer.self_attn.head_dim), dtype=torch.int64, device=table.device)
    decoder: Any = model.decoder
    steps = torch.eye(3, dtype=torch.int64, device=table.device)
    sines = [decoder.rotary_emb(table[:1, None].float(), step[:, None, None])[1][0, 0] for step in steps]
    return torch.stack(sines).abs().argmax(0)


def _sizes(model: TreeModel, num_positions: int) -> Sizes:
    layer: Any = model.layers[0]
    head_size = int(layer.self_attn.head_dim)
    table = source_of(model.embedding).weight
    return Sizes(
        num_layers=len(model.layers),
        hidden_size=int(table.shape[1]),
        num_heads=source_of(layer.self_attn.q_proj).weight.shape[0] // head_size,
        num_kv_heads=source_of(layer.self_attn.k_proj).weight.shape[0] // head_size,
        head_size=head_size,
        intermediate_size=int(source_of(layer.mlp.gate_proj).weight.shape[0]),
        vocab_size=model.vocab_size,
        num_positions=num_positions,
        eps=float(model.config.rms_norm_eps),
    )
