"""The configuration of `treering train`: model, task, sampling, training and output.

Loading it opens no file that a setting names, and imports no torch.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.engine import EngineConfig, SamplingConfig, check_vllm
from treering.config.eval import RlEvalConfig
from treering.config.load import Config
from treering.config.loop import LoopConfig
from treering.config.lora import LoraConfig, check_lora
from treering.config.metrics import RlMetricsConfig
from treering.config.model import ModelConfig
from treering.config.optim import OptimConfig, check_warmup
from treering.config.rl_task import TaskConfig, WarmupConfig
from treering.config.router import RouterConfig
from treering.config.run import RunConfig
from treering.config.runtime import RuntimeConfig, Schedule
from treering.config.teacher import TeacherConfig, check_teacher
from treering.config.values import Count, FilePath
from treering.errors import ConfigError


class HistoryConfig(Config):
    """The history of earlier rollouts, and how tokens are drafted from it. Changes speed, never a token."""

    drafts: Literal["on", "off"] = Field(
        default="on", description="off: one token per rollout and forward pass (off-switch)."
    )
    max_bytes: Annotated[int, Field(ge=1)] = Field(
        default=1 << 30, description="Memory of the history, its index included, in bytes."
    )
    max_epochs: Count = Field(default=2, description="Policy versions that are kept of each prompt.")
    max_draft: Annotated[int, Field(ge=1, le=64)] = Field(default=64, description="Tokens per draft, at most.")
    verify_costs: Literal["measured", "fixed"] = Field(
        default="fixed",
        description="What decides how much is drafted. fixed: min_acceptance, and no clock has a part in the run. "
        "measured: what forward passes take here, measured when the run begins: drafts are as long as pays, and none "
        "where none does. Another run may then differ in rounding.",
    )
    min_acceptance: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.018,
        description="With fixed costs: least chance of a first drafted token; later ones need more. Where a pass over "
        "more tokens takes longer, as on CPUs, drafts pay with about 0.4.",
    )
    shape: Literal["tree", "chain"] = Field(default="tree", description="Whether drafts branch.")
    sources: Annotated[tuple[Literal["history", "siblings", "own", "others"], ...], Field(strict=False)] = Field(
        default=("history", "siblings", "own", "others"),
        description="Where drafts come from: earlier epochs, the group's other rollouts, the rollout itself, earlier "
        "rollouts of other prompts.",
    )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.drafts == "on" and not self.sources:
            raise ConfigError('drafts = "on" needs a source, and sources is empty; name one, or set drafts = "off"')
        if len(set(self.sources)) < len(self.sources):
            raise ConfigError(
                f"a source is named once, and sources = {list(self.sources)} repeats one; remove the repetition"
            )
        return self


class RlRunConfig(RunConfig):
    """Where a run writes, and how often."""

    dir: FilePath = Field(
        default=Path("runs/train"),
        description="Run folder: config.json, metrics.jsonl, checkpoints, history, rollouts, TensorBoard files.",
    )
    rollouts: Literal["on", "off"] = Field(
        default="on", description="on: every rollout goes into a trajectory file of its epoch."
    )


class RlConfig(Config):
    """Everything that `treering train CONFIG` reads.

    Example: `[rl]` with `num_steps = 20` is a complete file; it trains a random Qwen3 of 4 layers on 64 chained sums.
    """

    # First two: where a mistaken key exists in two sections, the later one is suggested.
    teacher: TeacherConfig = Field(
        default_factory=TeacherConfig, description="The teacher of an on-policy distillation."
    )
    eval: RlEvalConfig = Field(default_factory=RlEvalConfig, description="Held-out prompts.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Adapters instead of all weights.")
    task: TaskConfig = Field(default_factory=TaskConfig, description="Prompts and rewards.")
    warmup: WarmupConfig = Field(default_factory=WarmupConfig, description="The supervised start.")
    rl: LoopConfig = Field(description="Steps, groups, advantages and the loss.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The engine.")
    # After `engine`: a misplaced max_tokens most often means the length of a rollout.
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How tokens are drawn.")
    history: HistoryConfig = Field(default_factory=HistoryConfig, description="Memory and drafts.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="The optimisation.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Losses on routers of experts.")
    metrics: RlMetricsConfig = Field(default_factory=RlMetricsConfig, description="Where metrics go.")
    run: RlRunConfig = Field(default_factory=RlRunConfig, description="The output.")
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig, description="The processes.")
    schedule: Schedule = Field(
        default="histopipe", description="With workers: which rollouts run where, and in which order."
    )

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        check_lora(self.lora, self.model)
        if self.rl.kl > 0 and self.lora.is_set and self.warmup.num_steps > 0:
            raise ConfigError(
                f"with [lora] the reference of rl.kl = {self.rl.kl} is the base model, and warmup.num_steps = "
                f"{self.warmup.num_steps} would move the policy away before the first step; set warmup.num_steps = 0"
            )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        check_warmup(warmup_steps=self.optim.warmup_steps, num_steps=self.rl.num_steps)
        has_solutions = self.task.kind != "prompts" and not self.task.runs_episodes
        if not has_solutions and self.warmup.num_steps > 0:
            raise ConfigError(
                f'warmup trains on solutions, and task.kind = "{self.task.kind}" has none; set warmup.num_steps = 0, '
                "and start from a model that `treering sft` has trained"
            )
        return self

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        needs_one = self.task.kind in ("prompts", "verifiers")
        if needs_one and self.task.tokenizer is None and self.model.path is None:
            raise ConfigError(
                f'task.kind = "{self.task.kind}" needs a tokenizer, and a random model has none; set task.tokenizer, '
                "or model.path to a model folder with its tokenizer"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        check_teacher(self.teacher, section="rl", objective=self.rl.objective)
        if self.teacher.is_set and self.runtime.workers > 0:
            raise ConfigError(
                f"a teacher runs in the process of the loop, and runtime.workers is {self.runtime.workers}; set "
                "runtime.workers=0"
            )
        own = ("clip", "max_importance", "entropy_coefficient")
        given = [name for name in own if getattr(self.rl, name) is not None]
        if self.rl.objective == "distill" and given:
            raise ConfigError(
                f'rl.objective = "distill" has no ratio and no bonus, and {", ".join(given)} is set; remove it, or set '
                "another objective with teacher.weight"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        engine = self.engine
        if engine.kind == "torch" and engine.verification != "rejection":
            raise ConfigError(
                'engine.verification is vLLM\'s, and engine.kind is "torch", which always draws the tokens of no '
                "drafts; remove it"
            )
        if engine.kind == "vllm":
            check_vllm(
                engine,
                self.sampling,
                old_logprobs=self.rl.old_logprobs,
                verify_costs=self.history.verify_costs,
            )
        return self

    @model_validator(mode="after")
    def _check_eval(self) -> Self:
        if self.eval.file is not None and self.task.kind != "prompts":
            raise ConfigError(
                f'task.kind = "{self.task.kind}" reads no prompts, and eval.file is set; set eval.share instead'
            )
        if self.eval.is_set and self.engine.kind == "vllm":
            raise ConfigError(
                'evaluations sample with the engine of this process, and engine.kind is "vllm"; remove [eval], and '
                "evaluate checkpoints with `treering eval RUN engine.kind=torch`"
            )
        return self

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        if not self.task.runs_episodes:
            return self
        if self.runtime.rebalance == "running":
            raise ConfigError(
                f'the episodes of task.kind = "{self.task.kind}" stay on the worker where they began, and '
                'runtime.rebalance = "running" moves rollouts that run; set "queued"'
            )
        if self.task.max_turn_tokens > self.sampling.max_tokens:
            raise ConfigError(
                f"sampling.max_tokens = {self.sampling.max_tokens} bounds a context with its turn, and "
                f"task.max_turn_tokens is {self.task.max_turn_tokens}; raise the one, or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        if self.rl.staleness > 0 and self.runtime.workers == 0:
            raise ConfigError(
                f"overlapping steps need worker processes, and rl.staleness is {self.rl.staleness} without any; set "
                "runtime.workers=1 or more, or rl.staleness=0"
            )
        return self

    @model_validator(mode="after")
    def _check_stealing(self) -> Self:
        if self.schedule == "work_stealing" and self.runtime.rebalance == "none":
            raise ConfigError(
                'schedule = "work_stealing" moves rollouts that wait, and runtime.rebalance = "none" lets none move; '
                'set runtime.rebalance = "queued", or another schedule'
            )
        return self
