"""Write the configurations of `treering init`, with sizes chosen from the data and the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.cli.corpus import load_corpus
from treering.cli.hub import find_folder
from treering.cli.inspect.inspect_options import InspectOptions
from treering.cli.inspect.run_inspect import inspect_files, verdict
from treering.cli.toml import comments, pair, section
from treering.config.sft_config import DataConfig
from treering.data import FormatName, Template
from treering.data.cache.folder import cache_folder
from treering.errors import ConfigError, InputError, UnsupportedError, plural
from treering.families import find_family
from treering.files.writing import read_object
from treering.rl.tasks.prompts_file import PromptsFile
from treering.types import DEFAULT_SHAPE, find_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Model named by `--model`."""

    name: str
    """Name in the configuration: a folder or a hub id."""
    tokenizer: Path | None
    """Its folder, if that holds a tokenizer."""
    vocab_size: int | None
    """Size of its vocabulary; None if its configuration does not have it."""
    context: int | None
    """Positions that it was trained for; None if its configuration does not have them."""
    shape: str
    """Name for `find_shape`: its configuration, or the default where its FLOPs cannot be counted."""


def read_model(name: str) -> ModelFacts:
    """Read config.json and the tokenizer; of a hub id only these small files are fetched.

    Raises:
        InputError: there is no such model, or its config.json cannot be read.
        UnsupportedError: its family is not supported.

    Example: the facts of Qwen/Qwen3-0.6B have a vocab_size of 151936 and a context of 40960.
    """
    folder = find_folder(name, [Path()], setting="--model", wanted="tokenizer")
    config = read_object(folder / "config.json", fix="name the folder of a Hugging Face model with --model")
    if "vision_config" not in config:
        find_family(str(config.get("model_type")))
    # Multimodal models keep the text settings in a section.
    inner = config.get("text_config")
    config |= inner if isinstance(inner, dict) else {}
    sizes = [config.get(name) for name in ("vocab_size", "max_position_embeddings")]
    vocab_size, context = (size if isinstance(size, int) else None for size in sizes)
    shape = str(folder)
    try:
        find_shape(shape)
    except (ConfigError, UnsupportedError):
        shape = DEFAULT_SHAPE
    tokenizer = folder if (folder / "tokenizer.json").is_file() else None
    return ModelFacts(name=name, tokenizer=tokenizer, vocab_size=vocab_size, context=context, shape=shape)


_MAX_TREES = 8
"""Default tasks per step; fewer if there are not enough for ten steps an epoch."""
_FEW_STEPS = 100
"""Steps per epoch below which several epochs are worth their time."""


def sft_text(file: Path, named: str, model: ModelFacts, *, run_dir: str, format: FormatName, template: Template) -> str:
    """Return the text of a configuration that trains `model` on a file, which it calls `named`.

    Raises:
        InputError: a file that `treering sft` refuses, or with token ids that the model does not know.
    """
    tokenizer = None if model.tokenizer is None else str(model.tokenizer.absolute())
    [report] = inspect_files(
        InspectOptions(files=[file], tokenizer=tokenizer, model_shape=model.shape, format=format, template=template)
    )
    settings: dict[str, Any] = {"format": format, "template": template}
    if model.context is not None and report.longest > model.context:
        settings |= {"max_length": model.context, "overlong": "cut"}
    data = DataConfig(files=(file.absolute(),), **settings)
    num_tasks = len(load_corpus(data, config_dir=Path(), model=model.tokenizer).tasks)
    if model.vocab_size is not None and report.largest_id >= model.vocab_size:
        raise InputError(
            f"{file} has the token id {report.largest_id}, but those of {model.name} end at {model.vocab_size - 1}; "
            "name the model whose tokenizer made them"
        )
    shape = DEFAULT_SHAPE if model.shape == DEFAULT_SHAPE else model.name
    chosen = [pair(key, value, _NOTES.get(key, "")) for key, value in settings.items() if value != "auto"]
    return "".join(
        [
            comments(
                f"{plural(report.trajectories, 'trajectory', 'trajectories')} of {plural(report.tasks, 'task')} with "
                f"{report.flat_tokens:,} tokens, of which {report.unique_tokens:,} are distinct (sharing "
                f"{report.sharing:.2f}). {verdict(report, shape)} The longest sequence has {report.longest:,} tokens, "
                f"the largest tree {report.largest_tree:,} distinct ones."
            ),
            section("model", _model(model)),
            section("data", [pair("files", [named]), *chosen]),
            _train(num_tasks),
            section("run", [pair("dir", run_dir, "Checkpoints and metrics. The same command resumes a stopped run.")]),
        ]
    )


_NOTES = {
    "max_length": "Tokens that the model was made for; the longest sequence has more.",
    "overlong": 'Keep their first tokens; "drop" drops the sequences.',
}


def _model(model: ModelFacts) -> list[str]:
    return [
        pair("path", model.name),
        comments('On a GPU: dtype = "bfloat16". It is the type to compute in; weights stay float32.'),
    ]


def _train(num_tasks: int) -> str:
    trees = max(1, min(_MAX_TREES, num_tasks // 10))
    steps = -(-num_tasks // trees)
    epochs = 3 if steps < _FEW_STEPS else 1
    train = [
        pair("num_epochs", epochs, f"Passes over the tasks: {plural(epochs * steps, 'step')}."),
        pair("trees_per_step", trees, "Tasks, each one tree, per optimizer step."),
        pair(
            "max_batch_tokens",
            "auto",
            "Distinct tokens at a time: as many as memory holds on one GPU, else 16384. A larger tree is cut, to the "
            "same gradient.",
        ),
    ]
    warmup = min(10, epochs * steps // 10)
    optim = [
        pair("learning_rate", 1e-5, "For all weights of a trained model; adapters ([lora], rank = 16) take 1e-4."),
        pair("warmup_steps", warmup, "Steps in which the rate rises from 0; then it falls as a cosine does."),
        pair("schedule", "cosine"),
    ]
    return section("train", train) + section("optim", optim)


_GROUP_SIZE = 8
_MAX_PROMPTS = 8
"""Default prompts per step; fewer if there are not enough for four steps an epoch."""
_EPOCHS = 3
"""Passes over the prompts; drafts come from earlier ones."""
_RESPONSE = 512
_MAX_BATCH = 64


def rl_text(
    file: Path, named: str, model: ModelFacts, *, reward: str, run_dir: str, template: Template = "auto"
) -> str:
    """Return the text of a configuration that trains `model` on the prompts of a file, which it calls `named`.

    Raises:
        ConfigError: an unknown reward.
        InputError: a bad file, a model without a tokenizer, or prompts that leave no room for a response.
    """
    if model.tokenizer is None:
        raise InputError(f"prompts need a tokenizer, but {model.name} has no tokenizer.json; name a model with one")
    task = PromptsFile(
        file,
        tokenizer=model.tokenizer,
        reward=reward,
        template=template,
        model=model.tokenizer,
        cache=cache_folder(),
    )
    lengths = [prompt.tokens.size for prompt in task.prompts]
    longest, response = _lengths(lengths, model)
    num_kept = sum(length <= longest for length in lengths)
    what = [pair("kind", "prompts"), pair("file", named), pair("reward", reward)]
    if template != "auto":
        what.append(pair("template", template))
    if num_kept < len(lengths):
        note = f"{len(lengths) - num_kept:,} longer ones are dropped, to leave room for responses."
        what.append(pair("max_prompt_tokens", longest, note))
    num_answers = sum(prompt.answer is not None for prompt in task.prompts)
    found = (
        f"{plural(len(lengths), 'prompt')}, {num_answers:,} of them with an answer, of {sum(lengths):,} tokens; the "
        f"longest has {max(lengths):,}. Rollouts of a prompt share it, and later epochs are drafted from earlier "
        "ones."
    )
    return "".join(
        [
            comments(found),
            section("model", _model(model)),
            section("task", what),
            section("sampling", [pair("max_tokens", response, "Tokens of a rollout; raise it if answers are cut.")]),
            section("rl", _loop(num_kept)),
            section("engine", [pair("max_batch", _MAX_BATCH, "Rollouts that run at a time.")]),
            section("optim", [pair("learning_rate", 1e-6, "For all weights; adapters ([lora], rank = 16) take 1e-5.")]),
            section(
                "run", [pair("dir", run_dir, "Checkpoints, metrics, rollouts. The same command resumes a stopped run.")]
            ),
        ]
    )


def _lengths(lengths: Sequence[int], model: ModelFacts) -> tuple[int, int]:
    """Return the most tokens of a prompt and of a response, which has at least half the model's context or `_RESPONSE`.

    Example: with a context of 100, prompts of 20 and 80 tokens are bounded by 50, and their responses by 50.
    """
    if model.context is None:
        return max(lengths), _RESPONSE
    longest = min(max(lengths), model.context - min(_RESPONSE, model.context // 2))
    if longest < min(lengths):
        raise InputError(
            f"the shortest prompt has {min(lengths):,} tokens, and {model.name} takes {model.context:,} with the "
            "response; shorten the prompts, or name another model"
        )
    return longest, min(_RESPONSE, model.context - longest)


def _loop(num_prompts: int) -> list[str]:
    prompts = max(1, min(_MAX_PROMPTS, num_prompts // 4))
    steps = _EPOCHS * -(-num_prompts // prompts)
    return [
        pair("num_epochs", _EPOCHS, f"Passes over the prompts: {plural(steps, 'step')}."),
        pair("prompts_per_step", prompts, f"{prompts} x {_GROUP_SIZE} rollouts a step."),
        pair("group_size", _GROUP_SIZE, "Rollouts of a prompt; advantages compare them with each other."),
    ]
