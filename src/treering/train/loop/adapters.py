"""LoRA adapters of a Hugging Face model: added to it, and stored as a folder that PEFT loads.

The model stays what it is: PEFT replaces its linear modules, and the base weights no longer require gradients.
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

from treering.config.lora import LoraOptions
from treering.errors import ConfigError, UnsupportedError
from treering.extras import require

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_NAME = "default"
_STORED_PREFIX = "base_model.model."


def add_lora(
    model: PreTrainedModel, options: LoraOptions, *, base: str, revision: str | None = None, with_head: bool = False
) -> None:
    """Add new adapters without dropout or bias to a model and freeze its weights; draws from torch's random state.

    Args:
        model: of a family with linear modules.
        options: with a rank; without target modules, all linear modules but the output head get adapters, and of a
            model that takes pictures those of its language model.
        base: folder or hub id of the base model, for whoever loads the adapters.
        revision: commit of a hub id.
        with_head: whether the output head gets adapters too.

    Raises:
        MissingExtraError: without PEFT.
        ConfigError: the model has no linear module of a given name.
        UnsupportedError: transformers and PEFT do not go together.

    Example: rank 8 on "q_proj" adds `lora_A` [8, in] and `lora_B` [out, 8] to each layer; `lora_B` begins with zeros.
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
            f"transformers {version('transformers')} adds no adapters of PEFT {version('peft')} ({error}); install "
            "releases that go together: transformers 5.23 with PEFT 0.21, or transformers 5.24 with PEFT 0.22"
        ) from error
    config.base_model_name_or_path, config.revision = base, revision


def has_adapter(model: nn.Module) -> bool:
    """Whether a Hugging Face model has adapters in it, as after `add_lora`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_tensors(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a model's weights that its adapters consist of, by the names under which PEFT stores them.

    Args:
        model: with adapters.
        weights: its state dict, or the whole weights of one that is sharded.

    Raises:
        UnsupportedError: something else of the model is trained too.
    """
    mark = f".{_NAME}."
    own = {name: weight for name, weight in weights.items() if ".lora_" in name and mark in name}
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and name not in own]
    if weights and others:
        raise UnsupportedError(
            f"a checkpoint of adapters holds LoRA weights alone, and {others[0]} is trained too; freeze it, or train "
            "all weights without adapters"
        )
    return {f"{_STORED_PREFIX}{name.replace(mark, '.')}": weight for name, weight in own.items()}


def save_adapter(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, which `PeftModel.from_pretrained` reads.

    PEFT's own way asks the hub for the base model's configuration each time.
    """
    from safetensors.torch import save_file

    stored = {name: weight.detach().cpu().contiguous() for name, weight in tensors.items()}
    save_file(stored, folder / ADAPTER_FILE, metadata={"format": "pt"})
    peft_config: Any = model.peft_config
    config = copy.copy(peft_config[_NAME])
    # A set would be written in another order each time.
    config.target_modules, config.inference_mode = sorted(config.target_modules), True
    config.save_pretrained(folder)


def base_checksum(model: nn.Module) -> str:
    """CRC-32 over the frozen weights: what adapters were trained on, whatever the place of its files.

    Example: "1c291ca3"; it differs if a single weight does.
    """
    return _checksum((name, weight) for name, weight in model.named_parameters() if not weight.requires_grad)


def weights_checksum(model: nn.Module) -> str:
    """CRC-32 over all weights, as `base_checksum` over the frozen ones."""
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
            f"lora.target_modules names linear modules, {type(model).__name__} has {', '.join(sorted(linear))}, and "
            f"{unknown[0]!r} is none of them; correct it"
        )
    if named is None and getattr(model.config, "vision_config", None) is not None:
        return _in_language_model(model)
    return sorted(linear if named is None else named)


def _in_language_model(model: PreTrainedModel) -> list[str]:
    """Whole names: parts of a vision tower have the same last ones, or mere numbers."""
    modules = ((name, each) for name, each in model.named_modules() if "language_model" in name.split("."))
    return sorted(name for name, each in modules if isinstance(each, nn.Linear))
