"""Formats validation errors as sentences: the dotted key, the rule, the value and the fix."""

import difflib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

_TOML_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "float",
    str: "string",
    list: "array",
    dict: "table",
    type(None): "nothing",
}
_SIMILARITY = 0.6
_NAMES_ELSEWHERE = MappingProxyType(
    {
        **dict.fromkeys(("log", "logger", "log_with", "mlflow", "report_to", "trackio", "wandb"), "metrics.sinks"),
        **{"model_name_or_path": "model.path", "output_dir": "run.dir", "save_steps": "run.save_every"},
        **{"save_total_limit": "run.keep", "r": "lora.rank", "lora_r": "lora.rank", "use_peft": "lora.rank"},
        **{"num_generations": "rl.group_size", "max_completion_length": "sampling.max_tokens"},
    }
)
"""Settings of transformers, TRL and verl whose names are far from ours."""

_PUSH = ("push_to_hub", "hub_model_id")


def describe(error: ValidationError, config_type: type[BaseModel]) -> list[str]:
    """One sentence per problem, in the order of the model.

    Example: for `[train]` with `learning_rat = 1` it is ["unknown key 'train.learning_rat'; did you mean
    'train.learning_rate'?"].
    """
    return [_sentence(record, config_type) for record in error.errors(include_url=False)]


def section_type(annotation: object) -> type[BaseModel] | None:
    """The model of a section field, or None for a value field."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _sentence(record: Mapping[str, Any], config_type: type[BaseModel]) -> str:
    dotted = ".".join(str(part) for part in record["loc"])
    if record["type"] == "extra_forbidden":
        return _unknown_key(dotted, record["loc"], config_type)
    if record["type"] == "missing":
        return f"{dotted} has no default and is not set; add it to the file, or pass {dotted}=..."
    if record["type"] == "value_error":
        message = str(record["ctx"]["error"])
        return f"{dotted}: {message}" if dotted else message
    expected = _expected(record)
    return f"{dotted}: expected {expected}, got {record['input']!r} ({_toml_name(record['input'])})"


def _expected(record: Mapping[str, Any]) -> str:
    if record["type"] in ("model_type", "dict_type"):
        return "a table of settings"
    if record["type"] == "tuple_type":
        return "an array"
    if record["type"] == "path_type":
        return "a path, as a string"
    message: str = record["msg"]
    return message.removeprefix("Input should be ").removeprefix("Input should have ")


def _toml_name(value: object) -> str:
    return _TOML_NAMES.get(type(value), type(value).__name__)


def _unknown_key(dotted: str, loc: tuple[int | str, ...], config_type: type[BaseModel]) -> str:
    keys = list(_dotted_keys(config_type))
    if loc[-1] in _PUSH:
        return f"unknown key {dotted!r}; a run is uploaded when you ask for it: treering push RUN REPO_ID"
    if (ours := _NAMES_ELSEWHERE.get(str(loc[-1]))) in keys:
        return f"unknown key {dotted!r}; did you mean {_told(str(ours), config_type)}?"
    section = [str(part) for part in loc[:-1]]
    here = {name: ".".join([*section, name]) for name in _keys(config_type, section)}
    # Settings are often written outside their section, so suggest keys of other sections too; prefer this one.
    by_name = {key.rpartition(".")[2]: key for key in keys} | here
    elsewhere = [key for key in keys if key.rpartition(".")[2] == loc[-1]]
    near_here = difflib.get_close_matches(str(loc[-1]), here, n=1, cutoff=_SIMILARITY)
    if section and elsewhere and near_here:
        # Settings of much the same name: say what each one is, those of later sections first as above.
        candidates = [here[near_here[0]], *reversed(elsewhere)]
        return f"unknown key {dotted!r}; did you mean {_listed([_told(key, config_type) for key in candidates])}?"
    near = difflib.get_close_matches(str(loc[-1]), by_name, n=1, cutoff=_SIMILARITY)
    if near:
        return f"unknown key {dotted!r}; did you mean {by_name[near[0]]!r}?"
    return f"unknown key {dotted!r}; valid keys here: {', '.join(here.values())}"


def _told(dotted: str, config_type: type[BaseModel]) -> str:
    """A key with the beginning of its description.

    Example: "'sampling.max_tokens' (Tokens of a rollout, at most)".
    """
    *sections, name = dotted.split(".")
    for section in sections:
        inner = section_type(config_type.model_fields[section].annotation)
        assert inner is not None, f"{section!r} holds no keys"
        config_type = inner
    return f"{dotted!r} ({re.split('[.;:]', config_type.model_fields[name].description or '')[0]})"


def _listed(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]])


def _keys(config_type: type[BaseModel], section: list[str]) -> list[str]:
    for name in section:
        inner = section_type(config_type.model_fields[name].annotation)
        assert inner is not None, f"{name!r} holds no keys"
        config_type = inner
    return [field.alias or name for name, field in config_type.model_fields.items()]


def _dotted_keys(config_type: type[BaseModel]) -> Iterator[str]:
    for name, field in config_type.model_fields.items():
        inner = section_type(field.annotation)
        if inner is None:
            yield field.alias or name
            continue
        yield from (f"{name}.{key}" for key in _dotted_keys(inner))
