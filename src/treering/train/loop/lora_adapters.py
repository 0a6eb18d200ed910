"""Add LoRA adapters to a Hugging Face model, and save them as a folder that PEFT loads.

The model keeps its class: PEFT replaces its linear modules, and the base weights no longer require gradients.
"""

import copy
import zlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treering.config.model import LoraOptions
from treering.errors import ConfigError, UnsupportedError
from treering.extras import require

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_NAME = "default"
_STORED_PREFIX = "base_model.model."


def add_lora(
    model: PreTrainedModel, options: LoraOptions, *, base: str, revision: str | None = None, with_head: bool = False
) -> None:
    """Add new adapters without dropout or bias to a model and freeze its weights, using torch's random state.

    Args:
        model: a model of a family with linear modules.
        options: options with a rank. Without target modules, all linear modules except the output head get adapters;
            in a model that takes images, only those of its language model.
        base: folder or hub id of the base model, recorded for loading the adapters.
        revision: commit of a hub id.
        with_head: whether the output head gets adapters too.

    Raises:
        MissingExtraError: PEFT is not installed.
        ConfigError: the model has no linear module with a given name.
        UnsupportedError: the versions of transformers and PEFT do not fit together.

    Example: rank 8 on "q_proj" adds `lora_A` [8, in] and `lora_B` [out, 8] to each layer; `lora_B` starts at zero.
    """
    assert options.rank is not None, "adapters have a rank"
    require("[lora]", "peft")
    from peft import LoraConfig

    config = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank if options.alpha is None else options.alpha,
        target_modules=[*_targets(model, options.target_modules), *(["lm_head"] if with_head else [])],
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(config, _NAME)
    except ValueError as error:
        raise UnsupportedError(
            f"transformers {version('transformers')} cannot add adapters of PEFT {version('peft')} ({error}); install "
            "versions that fit together: transformers 5.23 with PEFT 0.21, or transformers 5.24 with PEFT 0.22"
        ) from error
    config.base_model_name_or_path, config.revision = base, revision


def has_adapter(model: nn.Module) -> bool:
    """Return whether a Hugging Face model contains adapters, as after `add_lora`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_tensors(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter weights among a model's weights, by the names under which PEFT stores them.

    Args:
        model: a model with adapters.
        weights: its state dict, or the whole weights of a sharded model.

    Raises:
        UnsupportedError: another weight of the model is trained too.
    """
    mark = f".{_NAME}."
    own = {name: weight for name, weight in weights.items() if ".lora_" in name and mark in name}
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and name not in own]
    if weights and others:
        raise UnsupportedError(
            f"a checkpoint of adapters can hold only LoRA weights, and {others[0]} is trained too; freeze it, or train "
            "all weights without adapters"
        )
    return {f"{_STORED_PREFIX}{name.replace(mark, '.')}": weight for name, weight in own.items()}


def save_adapter(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, which `PeftModel.from_pretrained` reads.

    PEFT's own method asks the hub for the base model's configuration each time.
    """
    from safetensors.torch import save_file

    stored = {name: weight.detach().cpu().contiguous() for name, weight in tensors.items()}
    save_file(stored, folder / ADAPTER_FILE, metadata={"format": "pt"})
    peft_config: Any = model.peft_config
    config = copy.copy(peft_config[_NAME])
    # A set would be written in a different order each time.
    config.target_modules, config.inference_mode = sorted(config.target_modules), True
    config.save_pretrained(folder)


def base_checksum(model: nn.Module) -> str:
    """Return the CRC-32 of the frozen weights, which identifies the base of adapters wherever its files are.

    Example: "1c291ca3"; it differs if a single weight does.
    """
    return _checksum((name, weight) for name, weight in model.named_parameters() if not weight.requires_grad)


def weights_checksum(model: nn.Module) -> str:
    """Return the CRC-32 of all weights; see `base_checksum` for the frozen ones only."""
    return _checksum(model.named_parameters())


def _checksum(weights: Iterable[tuple[str, Tensor]]) -> str:
    total = 0
    for name, weight in weights:
        values = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        total = zlib.crc32(values, zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def _targets(model: PreTrainedModel, named: tuple[str, ...] | None) -> list[str]:
    head = model.get_output_embeddings()
    modules = model.named_modules()
    linear = {name.rpartition(".")[2] for name, each in modules if isinstance(each, nn.Linear) and each is not head}
    unknown = [name for name in named or () if name not in linear]
    if unknown:
        raise ConfigError(
            f"lora.target_modules must name linear modules of the model, got {unknown[0]!r}; {type(model).__name__} "
            f"has {', '.join(sorted(linear))}"
        )
    if named is None and getattr(model.config, "vision_config", None) is not None:
        return _in_language_model(model)
    return sorted(linear if named is None else named)


def _in_language_model(model: PreTrainedModel) -> list[str]:
    """Return full names: modules of a vision tower may have the same last names, or plain numbers."""
    modules = ((name, each) for name, each in model.named_modules() if "language_model" in name.split("."))
    return sorted(name for name, each in modules if isinstance(each, nn.Linear))
