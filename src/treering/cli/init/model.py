"""What a configuration must know of the user's model: its folder, vocabulary and context."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.cli.hub import find_folder
from treering.errors import ConfigError
from treering.files.json_object import read_object
from treering.types import DEFAULT_SHAPE, find_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as `--model` names it."""

    name: str
    """As in the configuration: a folder or a hub id."""
    tokenizer: Path | None
    """Its folder, if that holds a tokenizer."""
    vocab_size: int | None
    """Token ids that it knows; None if its configuration does not say."""
    context: int | None
    """Positions that it was made for; None if its configuration does not say."""
    shape: str
    """For `find_shape`: its configuration, or another's where FLOPs of its kind are not counted."""


def read_model(name: str) -> ModelFacts:
    """Reads config.json and the tokenizer; of a hub id these small files alone are fetched.

    Raises:
        InputError: there is no such model, or its config.json cannot be read.

    Example: the facts of Qwen/Qwen3-0.6B have a vocab_size of 151936 and a context of 40960.
    """
    folder = find_folder(name, [Path()], setting="--model", wanted="tokenizer")
    config = _read_config(folder)
    tokenizer = folder if (folder / "tokenizer.json").is_file() else None
    return ModelFacts(
        name=name,
        tokenizer=tokenizer,
        vocab_size=_count(config, "vocab_size"),
        context=_count(config, "max_position_embeddings"),
        shape=_shape(folder),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_object(folder / "config.json", fix="name the folder of a Hugging Face model with --model")
    # Models that also see keep what is about text apart.
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def _count(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) else None


def _shape(folder: Path) -> str:
    try:
        find_shape(str(folder))
    except ConfigError:
        return DEFAULT_SHAPE
    return str(folder)
