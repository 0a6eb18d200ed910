"""Format validation errors as sentences: the dotted key, the rule, the value and the fix."""

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
"""Least similarity to a key of the same section that is suggested."""
_SIMILARITY_ELSEWHERE = 0.9
"""Least similarity to a key of another section, unless it is part of the unknown key, as rank is of lora_rank."""
_FILES = ("data.files", "task.file")
_STEP_SIZE = ("train.trees_per_step", "rl.prompts_per_step")
_NAMES_ELSEWHERE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("clearml", "comet_ml", "log", "logger", "log_with", "mlflow", "report_to", "swanlab", "trackio", "wandb"),
            ("metrics.sinks",),
        ),
        **dict.fromkeys(
            ("model_name", "model_name_or_path", "name_or_path", "model.name", "model.id"), ("model.path",)
        ),
        **dict.fromkeys(("bf16", "fp16", "torch_dtype"), ("model.dtype",)),
        **dict.fromkeys(("data.path", "task.path", "data_path", "dataset", "dataset_name", "train_file"), _FILES),
        **{"task.data": _FILES, "output_dir": ("run.dir",), "save_steps": ("run.save_every",)},
        **{"save_total_limit": ("run.keep",), "eval_steps": ("eval.every",), "eval.steps": ("eval.every",)},
        **dict.fromkeys(("eval.fraction", "eval.size", "eval_size", "test_size", "val_size"), ("eval.share",)),
        **dict.fromkeys(("r", "lora_r", "use_peft"), ("lora.rank",)),
        **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), _STEP_SIZE),
        **dict.fromkeys(("gradient_accumulation_steps", "rollout_batch_size"), _STEP_SIZE),
        **{"lr": ("optim.learning_rate",), "warmup_ratio": ("optim.warmup_steps",)},
        **dict.fromkeys(("lr_scheduler_type", "scheduler"), ("optim.schedule",)),
        **dict.fromkeys(("num_generations", "rl.n", "sampling.n"), ("rl.group_size",)),
        **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef"), ("rl.kl",)),
        **dict.fromkeys(("clip_ratio", "cliprange", "epsilon"), ("rl.clip",)),
        **{"ppo_epochs": ("rl.num_iterations",), "loss_type": ("rl.objective",), "temp": ("sampling.temperature",)},
        **dict.fromkeys(("max_completion_length", "max_response_length"), ("sampling.max_tokens",)),
        **dict.fromkeys(("max_prompt_length", "task.max_length"), ("task.max_prompt_tokens",)),
    }
)
"""Settings of transformers, TRL and verl whose names differ much from ours; the first that a command has is meant."""

_TWINS = MappingProxyType({"train": "rl", "rl": "train"})
"""The section of steps in the other command."""

_PUSH = ("push_to_hub", "hub_model_id")

_STAND_IN = {"num_tasks": 32, "num_trials": 4, "vocab_size": 512, "seed": 0}
REMOVED = MappingProxyType(
    {
        "data.cache": ("on", "name a folder of your own in TREERING_CACHE"),
        "data.stand_in": (_STAND_IN, "data.max_tasks is its number of tasks"),
        "engine.continuation": ("copy", "finished rollouts are copied"),
        "engine.duplicate_rows": ("auto", "a rule decides"),
        "engine.max_prefill": (512, "it is 512"),
        "engine.seed": (0, "rl.seed is the seed of the noise too"),
        "eval.max_prompts": (None, "a smaller eval.share or eval.file evaluates fewer"),
        "eval.max_tasks": (None, "a smaller eval.share or eval.files evaluates fewer"),
        "eval.max_tokens": (None, "sampling.max_tokens bounds held-out rollouts too"),
        "history.max_epochs": (2, "two policy versions of a prompt are kept"),
        "history.shape": ("tree", "drafts are trees"),
        "history.sources": (["history", "siblings", "own", "others"], "drafts come from all of them"),
        "history.verify_costs": ("fixed", "history.min_acceptance says when drafts pay"),
        "metrics.log_completions_every": (10, "every tenth step has a table"),
        "model.head_size": (32, "it is 32, or half of a hidden_size below 64"),
        "model.intermediate_size": (384, "the MLP is 3 times as wide as hidden_size"),
        "model.num_heads": (4, "heads are 32 wide, at least two"),
        "model.num_kv_heads": (2, "pairs of query heads share keys and values"),
        "model.vocab_size": (None, "a random model has as many token ids as the data or its tokenizer"),
        "optim.eps": (1e-8, "it is 1e-8"),
        "rl.divisor": (None, "rl.normalizer may be a number of tokens"),
        "rl.importance": (None, "rl.max_importance caps the weight of each token"),
        "rl.kl_estimator": (None, "rl.kl_in decides"),
        "rl.min_importance": (None, "rl.max_importance caps the weight of each token"),
        "rl.num_train_threads": (None, "OMP_NUM_THREADS bounds them"),
        "rl.overlong_penalty": (1.0, "a rollout of sampling.max_tokens tokens loses 1"),
        "rl.parents": ("auto", "a rule decides"),
        "rl.sharing": ("always", "every tree is shared"),
        "runtime.launcher": ("local", "Ray starts the processes"),
        "runtime.listen": ("127.0.0.1", "Ray listens"),
        "runtime.trainer_gpus": (None, "workers and trainer ranks share the GPUs equally"),
        "runtime.worker_cpus": (None, "engine.num_threads is the CPUs of a worker"),
        "runtime.worker_gpus": (None, "workers and trainer ranks share the GPUs equally"),
        "sampling.repetition_penalty": (1.0, "a policy is trained on what it samples without a penalty"),
        "task.cache": ("on", "name a folder of your own in TREERING_CACHE"),
        "task.class": (None, "task.env names the class of an environment"),
        "task.episode_order": ("longest_first", "the longest start first"),
        "task.episodes_in_flight": ("auto", "twice engine.max_batch are"),
        "task.judge.cache": ("runs/judge", "it is runs/judge"),
        "task.judge.max_concurrent": (16, "16 requests run at a time"),
        "task.judge.num_retries": (3, "there are 3"),
        "task.judge.time_limit_s": (60.0, "runtime.reward_time_limit_s bounds each attempt"),
        "task.min_terms": (3, "sums have 3 numbers or more, with a lower max_terms as many"),
        "task.num_prompts": (64, "task.max_prompts is the number of sums"),
        "task.seed": (0, "sums are drawn with the seed 0"),
        "task.shared": ("once", "one branch of a run trains a token that several share"),
        "task.weights": ("runs", "a run counts as one sequence, however many branches it has"),
        "teacher.beta": (None, "the mixture of jsd has both in equal parts"),
        "teacher.temperature": (None, "both models have that of the rest of training"),
        "train.divisor": (None, "train.normalizer may be a number of tokens"),
        "train.objective": ("sft", "a [teacher] without weight is the whole loss, with a weight it is added"),
        "train.parents": ("auto", "a rule decides"),
        "train.shared": ("sum", "a shared token counts once per branch, as in flat training"),
        "train.sharing": ("always", "every tree is shared"),
        "warmup.num_prompts": (4096, "4096 are drawn"),
        "warmup.prompts_per_step": (64, "a step has 64"),
    }
)
"""Settings of earlier versions, with the value that now always holds, and what to know or set instead."""


def holds_still(key: str, value: object) -> bool:
    """Return whether a removed key has the value that now always holds."""
    return key in REMOVED and REMOVED[key][0] == value


def describe(error: ValidationError, config_type: type[BaseModel]) -> list[str]:
    """Return one sentence per problem, in the order of the model.

    Example: for `[optim]` with `learning_rat = 1` it is ["unknown key 'optim.learning_rat'; did you mean
    'optim.learning_rate'?"].
    """
    return [
        _sentence(each, config_type)
        for record in error.errors(include_url=False)
        for each in _by_key(record, config_type)
    ]


def keys_for_python(settings: Mapping[str, Any], config_type: type[BaseModel]) -> list[str]:
    """Return one sentence per key of a file that only Python callers may set."""

    def found_in(inside: Mapping[str, Any], inner: type[BaseModel], loc: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, value in inside.items():
            field = inner.model_fields.get(name)
            if field is None:
                continue
            if field.exclude:
                yield (*loc, name)
            elif (deeper := section_type(field.annotation)) is not None and isinstance(value, Mapping):
                yield from found_in(value, deeper, (*loc, name))

    return [_unknown_key(".".join(loc), loc, config_type) for loc in found_in(settings, config_type, ())]


def section_type(annotation: object) -> type[BaseModel] | None:
    """Return the model of a section field, or None for a value field."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _by_key(record: Mapping[str, Any], config_type: type[BaseModel]) -> Iterator[Mapping[str, Any]]:
    """Yield the record, or for an unknown section without a similar name one record per key."""
    inside, name = record["input"], str(*record["loc"][:1])
    is_section = record["type"] == "extra_forbidden" and len(record["loc"]) == 1 and isinstance(inside, Mapping)
    if not is_section or name in _NAMES_ELSEWHERE or difflib.get_close_matches(name, config_type.model_fields):
        yield record
        return
    yield from ({**record, "loc": (*record["loc"], key), "input": value} for key, value in inside.items())


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
    if dotted in REMOVED:
        return f"{dotted} is a setting of earlier versions: {REMOVED[dotted][1]}; remove it"
    if loc[-1] in _PUSH:
        return f"unknown key {dotted!r}; upload a checkpoint with `hf upload`, see docs/command_line.md"
    known_as = _NAMES_ELSEWHERE.get(dotted, _NAMES_ELSEWHERE.get(str(loc[-1]), ()))
    if ours := next((key for key in known_as if key in keys), None):
        return f"unknown key {dotted!r}; did you mean {_described(ours, config_type)}?"
    section = [str(part) for part in loc[:-1]]
    moved = [f"{name}.{loc[-1]}" for name in (_TWINS.get(".".join(section)), "optim")]
    if section and (known := [key for key in moved if key in keys]):
        return f"unknown key {dotted!r}; did you mean {known[0]!r}?"
    here = {name: ".".join([*section, name]) for name in _keys(config_type, section)}
    # Settings are often written in the wrong section, so suggest keys of other sections too; prefer this one.
    by_name = {key.rpartition(".")[2]: key for key in keys} | here
    elsewhere = [key for key in keys if key.rpartition(".")[2] == loc[-1]]
    near_here = difflib.get_close_matches(str(loc[-1]), here, n=1, cutoff=_SIMILARITY)
    if section and elsewhere and near_here:
        # Several settings have nearly this name: describe each one, those of later sections first as above.
        candidates = [here[near_here[0]], *reversed(elsewhere)]
        return f"unknown key {dotted!r}; did you mean {_listed([_described(key, config_type) for key in candidates])}?"
    if near := _nearest(str(loc[-1]), here, by_name):
        return f"unknown key {dotted!r}; did you mean {by_name[near]!r}?"
    valid = (
        f"valid keys here: {', '.join(here.values())}" if here else f"sections: {', '.join(config_type.model_fields)}"
    )
    return f"unknown key {dotted!r}; {valid}"


def _nearest(name: str, here: Mapping[str, str], everywhere: Mapping[str, str]) -> str | None:
    words = set(name.split("_"))
    parts = [known for known in everywhere if words >= set(known.split("_"))]
    surely = difflib.get_close_matches(name, everywhere, n=1, cutoff=_SIMILARITY_ELSEWHERE)
    if found := surely or difflib.get_close_matches(name, parts, n=1, cutoff=0.0):
        return found[0]
    return next(iter(difflib.get_close_matches(name, here, n=1, cutoff=_SIMILARITY)), None)


def _described(dotted: str, config_type: type[BaseModel]) -> str:
    """Return a key with the beginning of its description.

    Example: "'sampling.max_tokens' (Most tokens of a rollout, including those of an environment)".
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
        inner = (
            None if name not in config_type.model_fields else section_type(config_type.model_fields[name].annotation)
        )
        if inner is None:
            # The section itself is unknown.
            return []
        config_type = inner
    return [name for name, field in config_type.model_fields.items() if not field.exclude]


def _dotted_keys(config_type: type[BaseModel]) -> Iterator[str]:
    for name, field in config_type.model_fields.items():
        if field.exclude:
            continue
        inner = section_type(field.annotation)
        if inner is None:
            yield name
            continue
        yield from (f"{name}.{key}" for key in _dotted_keys(inner))
