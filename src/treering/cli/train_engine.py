"""Build the engine of `treering train`, its drafts and its evaluations, and the identity of a run."""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from treering.cli.hub import find_model
from treering.cli.run_folder import SHARED_HISTORY_FOLDER
from treering.cli.session import (
    Scalar,
    model_identity,
    section_identity,
    training_identity,
)
from treering.cli.train_task import TaskSource, load_task
from treering.config import RlConfig
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.config.steps import ComputeOptions
from treering.engine.protocol import Engine, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError, UnsupportedError, plural
from treering.history.draft.drafter import Drafter
from treering.ranks.group import RankGroup
from treering.rl.drafting import Drafting
from treering.rl.evaluation import EvalOptions, HeldOutRewards, eval_seed
from treering.rl.loop import EngineFactory
from treering.rl.sampler import check_contexts
from treering.rl.tasks.prompts_file import ChosenPrompts
from treering.rl.tasks.task import prompt_id_of
from treering.schedule.cluster import STANDARD, Cluster
from treering.train.loop.checkpoint import NAME
from treering.train.loop.compute import fitting_threads
from treering.train.loop.held_out import Measure
from treering.train.loop.lora_adapters import weights_checksum
from treering.train.progress import OnProgress

# A resumed run may change where the judge is and how it is called, but not its model or question.
_JUDGE_FREE = frozenset({"url"})


def make_drafting(config: RlConfig) -> Drafting | None:
    """Return the run's history and drafter, in a folder if other processes read it too; None if drafts are off."""
    if config.history.drafts == "off":
        return None
    is_read = config.engine.kind == "vllm" or config.runtime.workers > 0
    folder = config.run.dir.absolute() / SHARED_HISTORY_FOLDER if is_read else None
    return Drafting(config.history, folder)


def cluster_of(config: RlConfig) -> Cluster:
    """Return the workers as scheduling policies see them, with typical times until the run has measured its own."""
    return Cluster(
        num_workers=config.runtime.workers,
        num_slots=config.engine.max_batch,
        max_tokens=config.sampling.max_tokens,
        staleness=config.rl.staleness,
        latency=STANDARD,
        rebalancing=config.runtime.rebalance,
    )


def engine_factory(config: RlConfig, model: PreTrainedModel, source: TaskSource) -> EngineFactory:
    """Return a factory of engines of this model.

    Without `engine.max_tokens`, an engine has room for `max_batch` rollouts of the longest prompt, and for the prompts
    of a step up to the same size.

    Raises:
        UnsupportedError: vLLM is to sample from prompts with images.
    """
    engine = config.engine
    if engine.kind == "vllm" and source.has_images:
        raise UnsupportedError(
            'engine.kind = "vllm" does not support prompts with images, because vLLM\'s vision models are not tested '
            '(docs/images.md); set engine.kind = "torch"'
        )
    if engine.kind == "vllm":
        return _vllm_factory(config, model, source)
    num_slots = _num_slots(config, source)

    def make_engine(drafter: Drafter | None, version: int) -> TorchEngine:
        if drafter is not None:
            # A resumed run restores measured costs from its state.
            drafter.use_costs(None)
        return TorchEngine(
            model,
            drafter,
            max_batch=engine.max_batch,
            max_tokens=num_slots,
            seed=config.rl.seed,
            version=version,
            decode=source.decode,
            num_threads=_engine_threads(config, model),
            backend=engine.backend,
            costs="none",
        )

    return make_engine


def _vllm_factory(config: RlConfig, model: PreTrainedModel, source: TaskSource) -> EngineFactory:
    """Return a factory of engines that share one LLM, which drafts from the run's history if drafts are on."""
    from treering.integrations.vllm.llm import DraftsInVLLM, LLMSettings, make_llm
    from treering.integrations.vllm.vllm_engine import VLLMEngine

    engine, history = config.engine, config.history
    drafts = DraftsInVLLM(
        history=config.run.dir / SHARED_HISTORY_FOLDER,
        max_draft=history.max_draft,
        settings={name: getattr(history, name) for name in ("min_acceptance", "sources")},
    )
    settings = LLMSettings(
        max_batch=engine.max_batch,
        max_model_len=source.longest_prompt + config.sampling.max_tokens,
        num_slots=_num_slots(config, source),
        dtype=config.model.dtype,
        num_threads=_engine_threads(config),
        drafts=drafts if history.drafts == "on" else None,
    )
    # An LLM takes half a minute to start, an engine no time.
    llm = cache(lambda: make_llm(model, settings))

    def make_engine(drafter: Drafter | None, version: int) -> VLLMEngine:
        return VLLMEngine(
            llm(),
            model,
            version=version,
            seed=config.rl.seed,
            decode=source.decode,
            truncated="recompute" if config.rl.old_logprobs == "recomputed" else "refuse",
            verification=engine.verification,
            drafter=drafter,
        )

    return make_engine


def _num_slots(config: RlConfig, source: TaskSource) -> int:
    running = config.engine.max_batch * (source.longest_prompt + config.sampling.max_tokens) * source.room_factor
    prompts = min(config.rl.prompts_per_step * source.longest_prompt, running)
    return config.engine.max_tokens or running + prompts


def check_room(config: RlConfig, source: TaskSource) -> None:
    """Refuse a prompt that does not fit the engine, before the run begins.

    Raises:
        InputError: `engine.max_tokens` is less than a rollout may need.
    """
    needed = source.longest_prompt - 1 + config.sampling.max_tokens
    if config.engine.max_tokens is not None and needed > config.engine.max_tokens:
        raise InputError(
            f"engine.max_tokens is {config.engine.max_tokens}, but rollouts of the longest prompt "
            f"({source.longest_prompt} tokens) with sampling.max_tokens = {config.sampling.max_tokens} need {needed}; "
            "raise it, or shorten either"
        )


def _engine_threads(config: RlConfig, model: PreTrainedModel | None = None) -> int | None:
    """Return the threads of one engine: an equal share of the cores if workers and a trainer share the machine.

    A small model always takes one.
    """
    if config.engine.num_threads is not None or config.runtime.workers == 0:
        return config.engine.num_threads
    if model is not None and (fitting := fitting_threads(model)) is not None:
        return fitting
    return max(1, (os.cpu_count() or 1) // (config.runtime.workers + 1))


def warmup_options(config: RlConfig) -> tuple[OptimOptions, SftOptions]:
    """Return the options of the warm-up, in which all solutions of a step form one tree."""
    warmup = config.warmup
    rate = warmup.learning_rate
    optim = config.optim.changed(
        learning_rate=rate,
        min_learning_rate=rate / 10,
        schedule="cosine",
        warmup_steps=0,
        num_steps=warmup.num_steps,
    )
    shared = {name: getattr(config.options, name) for name in (*ComputeOptions.model_fields, "layout", "seed")}
    return optim, SftOptions(trees_per_step=1, router_losses=config.options.router_losses, **shared)


def identity(config: RlConfig, source: TaskSource, model: PreTrainedModel) -> dict[str, Scalar]:
    """Return what a resumed run must share with the original one; [history] and most of [engine] may change."""
    task = config.task
    # Checkpoints do not hold the reference's weights: a resumed run reads them again.
    needs_reference = config.rl.kl > 0 and not config.lora.is_set
    unread = ("verifiers", "renderer") if task.kind == "verifiers" else ()
    reward = task.reward
    if not isinstance(reward, str):
        reward = " + ".join(f"{each.weight} * {each.name}" for each in reward)
    return {
        **training_identity(config, model),
        **({"rl.reference": weights_checksum(model)} if needs_reference else {}),
        "task": source.digest,
        **({} if task.file is None else {f"task{NAME}": task.file.name}),
        "task.kind": task.kind,
        "task.reward": reward,
        "task.stop_tokens": str(task.stop_tokens),
        **{f"task.{name}": getattr(task, name) for name in ("env", "max_turn_tokens") if task.runs_episodes},
        **{f"task.{name}": json.dumps(getattr(task, name), sort_keys=True) for name in unread},
        **({} if source.columns_digest is None else {"task.file": source.columns_digest}),
        **(section_identity("task.judge", task.judge, free=_JUDGE_FREE) if task.uses_judge else {}),
        "engine.seed": config.rl.seed,
        "engine.kind": config.engine.kind,
        **section_identity("warmup", config.warmup),
        **section_identity("sampling", config.sampling),
    }


def warmup_identity(config: RlConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """Return what a resumed warm-up must share with the original one."""
    return {
        **model_identity(config, model),
        **section_identity("task", config.task, free=frozenset({"judge"})),
        **section_identity("warmup", config.warmup),
        "rl.seed": config.rl.seed,
        "rl.layout": config.rl.layout,
    }


def load_trained(config: RlConfig, config_dir: Path, shell_dir: Path = Path()) -> TaskSource:
    """Return the prompts to train on: the configured task's without the held-out ones.

    `shell_dir` is the folder in which the run was started.
    """
    model = find_model(config.model, config_dir)
    source = load_task(config.task_options, config_dir=config_dir, shell_dir=shell_dir, model=model)
    return source if config.eval.share is None else _part(source, config, held_out=False)


def load_held_out(config: RlConfig, config_dir: Path) -> TaskSource | None:
    """Return the prompts to evaluate; None if [eval] sets none.

    Raises:
        ConfigError, InputError: bad settings or files, or a share of less than two prompts.
    """
    section = config.eval
    if not section.is_set:
        return None
    task = config.task_options
    if section.file is not None:
        task = task.model_copy(update={"file": section.file, "max_prompts": None})
    source = load_task(task, config_dir=config_dir, model=find_model(config.model, config_dir))
    return source if section.file is not None else _part(source, config, held_out=True)


def held_out_notes(held: TaskSource, trained: TaskSource) -> list[str]:
    """Return notes on the held-out prompts and their overlap with training."""
    # Tasks of an environment have no tokens.
    known = {prompt_id_of(prompt.tokens, prompt.images) for prompt in trained.task.prompts if prompt.tokens.size}
    num_common = sum(prompt_id_of(prompt.tokens, prompt.images) in known for prompt in held.task.prompts)
    notes = [f"{len(held.task.prompts)} held-out {'tasks' if held.runs_episodes else 'prompts'} are evaluated"]
    return [*notes, f"{num_common} of them are also trained on, with the same tokens"] if num_common else notes


def measure_rewards(
    config: RlConfig, held: TaskSource, policy: Callable[[], nn.Module], rank_group: RankGroup | None = None
) -> Measure:
    """Return a function that measures a policy on held-out prompts.

    Args:
        config: of the run.
        held: the held-out prompts.
        policy: returns the whole model with the current weights; all ranks call it at each measurement.
        rank_group: ranks that share the prompts.
    """
    section = config.eval
    max_tokens = config.sampling.max_tokens
    # Engines take their size from these settings; no wall clock influences an evaluation.
    own = config.model_copy(
        update={
            "sampling": Sampling(max_tokens=max_tokens),
            "rl": config.rl.model_copy(update={"seed": eval_seed(config.rl.seed)}),
            "engine": config.engine.model_copy(update={"max_tokens": None}),
            "history": config.history.changed(drafts="off"),
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

    rewards = HeldOutRewards(held.task, make_engine, options, rank_group)

    def measure(on_progress: OnProgress | None) -> Mapping[str, float]:
        report = rewards(on_progress)
        if report.reward_errors:
            warnings.warn(
                f"evaluation: {plural(report.num_reward_errors, 'rollout')} dropped; {report.reward_errors[0]}",
                stacklevel=2,
            )
        return report.values()

    return measure


def _part(source: TaskSource, config: RlConfig, *, held_out: bool) -> TaskSource:
    section, prompts = config.eval, source.task.prompts
    ids = [prompt.prompt_id for prompt in prompts]
    held = section.held_out(ids, "prompts")
    notes = source.notes if held_out else (*source.notes, *section.share_notes(ids, "prompts"))
    numbers = [number for number, is_held in enumerate(held) if is_held == held_out]
    chosen = ChosenPrompts(prompts, numbers)
    return replace(source, task=source.task.subset(chosen), notes=notes)
