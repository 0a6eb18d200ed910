"""Translates the settings of `treering train` to the records that training takes, and to the run's identity."""

import json
import os
from functools import cache
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from treering.cli.run_folder import SHARED_HISTORY_FOLDER
from treering.cli.settings import (
    Scalar,
    compute_options,
    distill_options,
    model_identity,
    router_losses,
    section_identity,
    training_identity,
)
from treering.cli.train.task import TaskSource
from treering.config import RlConfig
from treering.config.load import of_same_name
from treering.config.rl_task import TaskConfig
from treering.engine.request import Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.history.draft.drafter import Drafter
from treering.rl.drafting import Drafting, DraftOptions
from treering.rl.loop import EngineFactory
from treering.rl.options import RlOptions
from treering.schedule.cluster import Cluster
from treering.schedule.latency import STANDARD
from treering.train.loop.adapters import weights_checksum
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.optim import OptimOptions
from treering.train.loop.sft import LoopOptions

if TYPE_CHECKING:
    from treering.integrations.vllm.engine.launch import LLMSettings

# Where the judge is, and how it is asked; its model and its question stay.
_JUDGE_FREE = frozenset({"url", "max_concurrent", "time_limit_s", "num_retries", "cache"})


def rl_options(config: RlConfig, source: TaskSource, compute: ComputeOptions) -> RlOptions:
    """The options of the loop."""
    return RlOptions(
        **of_same_name(RlOptions, config.rl),
        sampling=Sampling(**config.sampling.model_dump()),
        distill=distill_options(config.teacher),
        router_losses=router_losses(config.router),
        compute=compute,
    )


def make_drafting(config: RlConfig, *, shares_host: bool = True) -> Drafting | None:
    """The run's history and drafter, in a folder if other processes read it too; None if drafts are off.

    `shares_host`: whether all processes see files of this host; else the workers are sent the history.

    Raises:
        ConfigError: the drafter is inside vLLM, perhaps on another host.
    """
    if config.history.drafts == "off":
        return None
    if config.engine.kind == "vllm" and not shares_host:
        raise ConfigError(
            "the drafter inside vLLM reads the history from files of the controller's host, and workers may run on "
            'others; set history.drafts = "off" or engine.kind = "torch", or leave runtime.listen on loopback'
        )
    is_read = config.engine.kind == "vllm" or (config.runtime.workers > 0 and shares_host)
    folder = config.run.dir / SHARED_HISTORY_FOLDER if is_read else None
    return Drafting(DraftOptions(**config.history.model_dump(exclude={"drafts", "verify_costs"})), folder)


def cluster_of(config: RlConfig) -> Cluster:
    """The workers as policies plan for them, with usual times until the run has measured its own."""
    return Cluster(
        num_workers=config.runtime.workers,
        num_slots=config.engine.max_batch,
        max_tokens=config.sampling.max_tokens,
        staleness=config.rl.staleness,
        latency=STANDARD,
        rebalancing=config.runtime.rebalance,
    )


def engine_factory(config: RlConfig, model: PreTrainedModel, source: TaskSource) -> EngineFactory:
    """Makes engines of this model.

    Without `max_tokens`, an engine has room for `max_batch` rollouts of the longest prompt and for the prompts of a
    step, the latter up to the same size again.

    Raises:
        UnsupportedError: vLLM is to sample, and a prompt has pictures.
    """
    engine = config.engine
    if engine.kind == "vllm" and source.has_pictures:
        raise UnsupportedError(
            "prompts with pictures are sampled by the embedded engine alone, since vLLM's vision models could not be "
            'tested (docs/pictures.md says why); got engine.kind = "vllm", set "torch"'
        )
    if engine.kind == "vllm":
        return _vllm_factory(config, model, source)
    num_slots = _num_slots(config, source)
    is_fixed = config.history.verify_costs == "fixed"

    def make_engine(drafter: Drafter | None, version: int) -> TorchEngine:
        if drafter is not None and is_fixed:
            # A resumed run that measured costs before has them in its state.
            drafter.use_costs(None)
        return TorchEngine(
            model,
            drafter,
            max_batch=engine.max_batch,
            max_tokens=num_slots,
            max_prefill=engine.max_prefill,
            seed=engine.seed,
            version=version,
            decode=source.decode,
            num_threads=_engine_threads(config),
            backend=engine.backend,
            duplicate_rows=engine.duplicate_rows,
            continuation=engine.continuation,
            costs="none" if is_fixed else "measured",
        )

    return make_engine


def _vllm_factory(config: RlConfig, model: PreTrainedModel, source: TaskSource) -> EngineFactory:
    """Makes engines that share one LLM, which drafts from the run's history if drafts are on."""
    from treering.integrations.vllm.engine.launch import make_llm
    from treering.integrations.vllm.engine.vllm_engine import VLLMEngine

    # An LLM takes half a minute to start, and an engine none.
    llm = cache(lambda: make_llm(model, _llm_settings(config, source)))

    def make_engine(drafter: Drafter | None, version: int) -> VLLMEngine:
        return VLLMEngine(
            llm(),
            model,
            version=version,
            seed=config.engine.seed,
            decode=source.decode,
            truncated="recompute" if config.rl.old_logprobs == "recomputed" else "refuse",
            verification=config.engine.verification,
            drafter=drafter,
        )

    return make_engine


def _llm_settings(config: RlConfig, source: TaskSource) -> "LLMSettings":
    from treering.integrations.vllm.engine.launch import DraftsInVLLM, LLMSettings

    engine, history = config.engine, config.history
    drafts = DraftsInVLLM(
        history=config.run.dir / SHARED_HISTORY_FOLDER,
        max_draft=history.max_draft,
        settings={name: getattr(history, name) for name in ("min_acceptance", "sources")},
    )
    return LLMSettings(
        max_batch=engine.max_batch,
        max_model_len=source.longest_prompt + config.sampling.max_tokens,
        num_slots=_num_slots(config, source),
        dtype=config.model.dtype,
        max_prefill=engine.max_prefill,
        num_threads=_engine_threads(config),
        drafts=drafts if history.drafts == "on" else None,
    )


def _num_slots(config: RlConfig, source: TaskSource) -> int:
    """Tokens whose keys and values an engine holds."""
    running = config.engine.max_batch * (source.longest_prompt + config.sampling.max_tokens) * source.room_factor
    prompts = min(config.rl.prompts_per_step * source.longest_prompt, running)
    return config.engine.max_tokens or running + prompts


def check_room(config: RlConfig, source: TaskSource) -> None:
    """Refuses a prompt that the engine would refuse in its step.

    Raises:
        InputError: `engine.max_tokens` is less than a rollout may need.
    """
    needed = source.longest_prompt - 1 + config.sampling.max_tokens
    if config.engine.max_tokens is not None and needed > config.engine.max_tokens:
        raise InputError(
            f"the longest prompt has {source.longest_prompt} tokens, with sampling.max_tokens = "
            f"{config.sampling.max_tokens} its rollouts need {needed}, and engine.max_tokens is "
            f"{config.engine.max_tokens}; raise it, or shorten either"
        )


def _engine_threads(config: RlConfig) -> int | None:
    """Threads of one engine: by default an equal share of the cores if workers and a trainer share the machine.

    On Ray it is what Ray reserves for a worker, rounded down, and at least one.
    """
    if config.engine.num_threads is not None or config.runtime.workers == 0:
        return config.engine.num_threads
    if config.runtime.launcher == "ray":
        return max(1, int(config.runtime.resources.rollout_worker.num_cpus))
    return max(1, (os.cpu_count() or 1) // (config.runtime.workers + 1))


def warmup_options(config: RlConfig) -> tuple[OptimOptions, LoopOptions]:
    """Options of the warm-up, in which all solutions of a step form one tree."""
    warmup = config.warmup
    rate = warmup.learning_rate
    length = {"learning_rate": rate, "min_learning_rate": rate / 10, "schedule": "cosine", "warmup_steps": 0}
    optim = OptimOptions(**of_same_name(OptimOptions, config.optim) | length | {"num_steps": warmup.num_steps})
    options = LoopOptions(
        trees_per_step=1,
        compute=compute_options(config.model, config.rl),
        layout=config.rl.layout,
        router_losses=router_losses(config.router),
        seed=config.rl.seed,
        ranks=config.rl.ranks,
    )
    return optim, options


def identity(config: RlConfig, source: TaskSource, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run must share with the original one: of [history] and [engine] the seed of the noise alone."""
    task = config.task
    # Checkpoints hold no weights of the reference: a resumed run reads it again.
    needs_reference = config.rl.kl > 0 and not config.lora.is_set
    reward = task.reward
    if not isinstance(reward, str):
        reward = " + ".join(f"{each.weight} * {each.name}" for each in reward)
    return {
        **training_identity(config, model),
        **({"rl.reference": weights_checksum(model)} if needs_reference else {}),
        "task": source.digest,
        "task.kind": task.kind,
        "task.reward": reward,
        "task.stop_tokens": str(task.stop_tokens),
        **(_environment_identity(task) if task.runs_episodes else {}),
        **({} if source.columns_digest is None else {"task.file": source.columns_digest}),
        **(section_identity("task.judge", task.judge, free=_JUDGE_FREE) if task.uses_judge else {}),
        "engine.seed": config.engine.seed,
        "engine.kind": config.engine.kind,
        **section_identity("warmup", config.warmup),
        **section_identity("sampling", config.sampling),
        **section_identity("optim", config.optim),
    }


def _environment_identity(task: TaskConfig) -> dict[str, Scalar]:
    names = ("class_", "max_turn_tokens", "shared", "weights")
    own = {f"task.{name.rstrip('_')}": getattr(task, name) for name in names}
    if task.kind != "verifiers":
        return own
    unread = {f"task.{name}": json.dumps(getattr(task, name), sort_keys=True) for name in ("verifiers", "renderer")}
    return {**own, "task.env": task.env, **unread}


def warmup_identity(config: RlConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed warm-up must share with the original one."""
    return {
        **model_identity(config, model),
        **section_identity("task", config.task, free=frozenset({"judge"})),
        **section_identity("warmup", config.warmup),
        "rl.seed": config.rl.seed,
        "rl.layout": config.rl.layout,
    }
