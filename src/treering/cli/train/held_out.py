"""The [eval] section of `treering train`: which prompts are held out, and how a policy is measured on them."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from treering.cli.hub import find_model
from treering.cli.train.settings import engine_factory
from treering.cli.train.task import TaskSource, load_task
from treering.config import RlConfig
from treering.config.engine import SamplingConfig
from treering.engine.protocol import Engine
from treering.engine.request import Sampling
from treering.ranks.group import RankGroup
from treering.rl.checks import check_contexts
from treering.rl.evaluation import EvalOptions, HeldOutRewards, eval_seed
from treering.rl.tasks.stored_prompts import ChosenPrompts
from treering.rl.tasks.task import prompt_id_of
from treering.train.loop.held_out import Measure
from treering.train.progress import OnProgress


def load_trained(config: RlConfig, config_dir: Path, shell_dir: Path = Path()) -> TaskSource:
    """The prompts to train on: those of the configured task that are not held out.

    `shell_dir` is the folder in which the run was started.
    """
    model = find_model(config.model, config_dir)
    source = load_task(
        config.task, config_dir=config_dir, shell_dir=shell_dir, model=model, max_rows=config.engine.max_batch
    )
    return source if config.eval.share is None else _part(source, config, held_out=False)


def load_held_out(config: RlConfig, config_dir: Path) -> TaskSource | None:
    """The prompts to evaluate; None if the section sets none.

    Raises:
        ConfigError, InputError: bad settings or files, or a share of which one side is empty.
    """
    section = config.eval
    if not section.is_set:
        return None
    task = config.task
    if section.file is not None:
        task = task.model_copy(update={"file": section.file, "max_prompts": section.max_prompts})
    source = load_task(
        task, config_dir=config_dir, model=find_model(config.model, config_dir), max_rows=config.engine.max_batch
    )
    return source if section.file is not None else _part(source, config, held_out=True)


def held_out_notes(held: TaskSource, trained: TaskSource) -> list[str]:
    """What a user should know of the two parts."""
    # Tasks of an environment have no tokens of their own.
    known = {prompt_id_of(prompt.tokens, prompt.pictures) for prompt in trained.task.prompts if prompt.tokens.size}
    num_common = sum(prompt_id_of(prompt.tokens, prompt.pictures) in known for prompt in held.task.prompts)
    notes = [f"{len(held.task.prompts)} held-out {'tasks' if held.runs_episodes else 'prompts'} are evaluated"]
    return [*notes, f"{num_common} of them are trained on too, with the same tokens"] if num_common else notes


def measure_rewards(
    config: RlConfig, held: TaskSource, policy: Callable[[], nn.Module], group: RankGroup | None = None
) -> Measure:
    """What measures a policy on held-out prompts.

    Args:
        config: of the run.
        held: the prompts.
        policy: the whole model with the present weights; asked for at each measurement, by all ranks.
        group: ranks that share the prompts.
    """
    section = config.eval
    max_tokens = section.max_tokens or config.sampling.max_tokens
    # Engines size themselves by these settings; no clock has a part in an evaluation.
    own = config.model_copy(
        update={
            "sampling": SamplingConfig(max_tokens=max_tokens),
            "engine": config.engine.model_copy(update={"seed": eval_seed(config.engine.seed), "max_tokens": None}),
            "history": config.history.model_copy(update={"drafts": "off", "verify_costs": "fixed"}),
        }
    )
    greedy = {"top_k": 1} if section.temperature == 0 else {"temperature": section.temperature}
    options = EvalOptions(
        sampling=Sampling(max_tokens=max_tokens, **greedy),
        num_samples=section.num_samples,
        pass_reward=section.pass_reward,
    )

    def make_engine() -> Engine:
        model = policy()
        check_contexts(held.task, max_tokens, model)
        return engine_factory(own, model, held)(None, 0)

    rewards = HeldOutRewards(held.task, make_engine, options, group)

    def measure(on_progress: OnProgress | None) -> Mapping[str, float]:
        report = rewards(on_progress)
        if report.reward_errors:
            warnings.warn(
                f"evaluation: {report.num_reward_errors} rollouts left out; {report.reward_errors[0]}", stacklevel=2
            )
        return report.values()

    return measure


def _part(source: TaskSource, config: RlConfig, *, held_out: bool) -> TaskSource:
    section, prompts = config.eval, source.task.prompts
    held = section.held_out([prompt.prompt_id for prompt in prompts], "prompts")
    numbers = [number for number, is_held in enumerate(held) if is_held == held_out]
    chosen = ChosenPrompts(prompts, numbers[: section.max_prompts] if held_out else numbers)
    return replace(source, task=source.task.subset(chosen))
