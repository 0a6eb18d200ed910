"""Builds the model of a configuration: pre-trained from a folder, or small and random."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from treering.config.model import ModelConfig
from treering.errors import ConfigError, InputError


def build_model(config: ModelConfig, *, num_ids: int, seed: int, folder: Path | None) -> PreTrainedModel:
    """The model with float32 weights, on the configured device.

    Args:
        config: the [model] section.
        num_ids: number of token ids in the data; the vocabulary of a random model without `vocab_size`.
        seed: of random weights; changes torch's random state.
        folder: where `config.path` was found; None for a random model.

    Raises:
        ConfigError: the vocabulary is too small, or there is no cuda device.
        InputError: the folder holds no model.

    Example: the default shape with num_ids=512 has about 917,000 parameters.
    """
    device = choose_device(config.device)
    model = _random(config, num_ids, seed) if folder is None else _load(folder)
    vocab_size = int(model.config.vocab_size)
    if vocab_size < num_ids:
        fix = "set model.vocab_size to that" if folder is None else "use the tokenizer of this model"
        raise ConfigError(f"the data has token ids up to {num_ids - 1}, and the model knows {vocab_size} ids; {fix}")
    return model.to(device)


def choose_device(requested: str) -> torch.device:
    """The device for "auto" (cuda if there is one), "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" without a CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ConfigError('model.device = "cuda" needs a CUDA device, and torch sees none; set "auto" or "cpu"')
    return torch.device("cuda" if has_cuda and requested != "cpu" else "cpu")


def _random(config: ModelConfig, num_ids: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size or num_ids,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            intermediate_size=config.intermediate_size,
            tie_word_embeddings=config.tie_embeddings,
            dtype=torch.float32,
        )
    )


def _load(folder: Path) -> PreTrainedModel:
    try:
        # Training needs float32 weights; bfloat16 ones lose small updates.
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.path needs the folder of a Hugging Face causal language model, {folder} has none ({error}); "
            "correct the path"
        ) from error
