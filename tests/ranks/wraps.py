"""Ways to spread one float64 model over ranks."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.models import build_float64
from treering.model.layers import enable_gradient_checkpointing


def build(name: str) -> nn.Module:
    """Build the model of a wrap, before wrapping."""
    model: Any = build_float64(tie_word_embeddings=name.startswith("tied"))
    if name == "LoRA":
        return with_lora(model)
    if name.startswith("checkpointing"):
        enable_gradient_checkpointing(model, "reentrant" if "reentrant" in name else "non_reentrant")
    return model


def with_lora(model: Any) -> nn.Module:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config).double().train()  # type: ignore[no-any-return]


def shard_layers(model: Any, **options: Any) -> nn.Module:
    """Wrap each layer, and all in one more unit."""
    for layer in model.get_decoder().layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)  # type: ignore[no-any-return]


def shard_apart(model: Any) -> nn.Module:
    """Wrap the decoder and the head as two units, without one around all."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.model)
    fully_shard(model.lm_head)
    return model  # type: ignore[no-any-return]


def shard_all(model: Any) -> nn.Module:
    """Wrap units of all sizes, inside each other."""
    shard_apart(model)
    return fully_shard(model)  # type: ignore[no-any-return]


def shard_some(model: Any) -> nn.Module:
    """Wrap only layers: embedding, last norm and head are whole on all ranks."""
    for layer in model.model.layers:
        fully_shard(layer)
    return model  # type: ignore[no-any-return]


def shard_hybrid(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return shard_layers(model, mesh=mesh)


def shard_lora(model: Any) -> nn.Module:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[no-any-return]


def shard_tied_list(model: Any) -> nn.Module:
    """Keep tied weights in one unit, by torch's own method."""
    fully_shard([model.model.embed_tokens, model.lm_head])
    return shard_layers(model)


SHARDED: MappingProxyType[str, Callable[[Any], nn.Module]] = MappingProxyType(
    {
        "root": fully_shard,
        "layers": shard_layers,
        "apart": shard_apart,
        "all": shard_all,
        "some": shard_some,
        "tied": shard_layers,
        "tied root": fully_shard,
        "tied list": shard_tied_list,
        "LoRA": shard_lora,
        "checkpointing": shard_layers,
        "checkpointing reentrant": shard_layers,
        "hybrid": shard_hybrid,
        "offload": lambda model: shard_layers(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    }
)
WHOLE: MappingProxyType[str, Callable[[Any], nn.Module]] = MappingProxyType(
    {"DDP": DistributedDataParallel, "LoRA": DistributedDataParallel, "tied": lambda model: model}
)
