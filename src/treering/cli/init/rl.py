"""The configuration of `treering train` for a file of prompts: what was found in it, and sizes by that."""

from pathlib import Path

from treering.cli.init.model import ModelFacts
from treering.cli.init.toml import comments, pair, section
from treering.errors import InputError
from treering.rl.tasks.prompts_file import PromptsFile

_GROUP_SIZE = 8
_MAX_PROMPTS = 8
"""Prompts of a step, as by default; fewer where there are not enough for four steps an epoch."""
_EPOCHS = 3
"""Drafts come from earlier epochs, so there are some."""
_RESPONSE = 512
_MAX_BATCH = 64


def rl_text(file: Path, named: str, model: ModelFacts, *, reward: str, run_dir: str) -> str:
    """The text of a configuration that trains `model` on the prompts of a file, which it calls `named`.

    Raises:
        ConfigError: an unknown reward.
        InputError: a bad file, a model without a tokenizer, or prompts that leave no room for a response.
    """
    if model.tokenizer is None:
        raise InputError(f"prompts need a tokenizer, and {model.name} has no tokenizer.json; name a model that has one")
    task = PromptsFile(file, tokenizer=model.tokenizer, reward=reward, model=model.tokenizer)
    lengths = [prompt.tokens.size for prompt in task.prompts]
    response = _response(max(lengths), model)
    num_answers = sum(prompt.answer is not None for prompt in task.prompts)
    found = (
        f"{len(lengths):,} prompts, {num_answers:,} of them with an answer, of {sum(lengths):,} tokens; the longest "
        f"has {max(lengths):,}. Rollouts of a prompt share it, and each later epoch is drafted from the ones before."
    )
    return "".join(
        [
            comments(found),
            section("model", _model(model)),
            section("task", _task(named, reward)),
            section("sampling", [pair("max_tokens", response, "Tokens of a rollout; raise it if answers are cut.")]),
            section("rl", _loop(len(lengths))),
            section("engine", [pair("max_batch", _MAX_BATCH, "Rollouts that run at one time.")]),
            section("optim", [pair("learning_rate", 1e-6, "For all weights; adapters ([lora], rank = 16) take 1e-5.")]),
            section(
                "run", [pair("dir", run_dir, "Checkpoints, metrics, rollouts. The same command resumes a stopped run.")]
            ),
        ]
    )


def _response(longest: int, model: ModelFacts) -> int:
    room = _RESPONSE if model.context is None else min(_RESPONSE, model.context - longest)
    if room < 1:
        raise InputError(
            f"a prompt has {longest:,} tokens, and {model.name} was made for {model.context:,}; shorten it, or name "
            "another model"
        )
    return room


def _model(model: ModelFacts) -> list[str]:
    return [pair("path", model.name), comments('On a GPU: dtype = "bfloat16".')]


def _task(named: str, reward: str) -> list[str]:
    return [pair("kind", "prompts"), pair("file", named), pair("reward", reward)]


def _loop(num_prompts: int) -> list[str]:
    prompts = max(1, min(_MAX_PROMPTS, num_prompts // 4))
    steps = _EPOCHS * -(-num_prompts // prompts)
    return [
        pair("num_epochs", _EPOCHS, f"Passes over the prompts: {steps:,} steps."),
        pair("prompts_per_step", prompts, f"{prompts} x {_GROUP_SIZE} rollouts a step."),
        pair("group_size", _GROUP_SIZE, "Rollouts of a prompt; advantages compare them with each other."),
    ]
