"""The configuration of `treering train`: model, task, sampling, training and output.

Loading it opens no file that a setting names, and imports no torch.
"""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from treering.config.engine import DraftOptions, EngineConfig, Sampling, check_vllm
from treering.config.eval import RlEvalConfig
from treering.config.rl_options import RlOptions
from treering.config.rl_task import TaskConfig, WarmupConfig
from treering.config.run import RlMetricsConfig, RunConfig
from treering.config.runtime import RuntimeConfig, Schedule
from treering.config.sections import TrainingConfig
from treering.config.values import FilePath
from treering.errors import ConfigError


class RlRunConfig(RunConfig):
    """Where a run writes, and how often."""

    dir: FilePath = Field(default=Path("runs/train"), description=RunConfig.model_fields["dir"].description)
    rollouts: Literal["on", "off"] = Field(
        default="on", description="on: write every rollout to a trajectory file of its epoch."
    )


class RlConfig(TrainingConfig):
    """Everything that `treering train CONFIG` reads.

    Example: `[rl]` with `num_steps = 20` is a complete file; it trains a random Qwen3 of 4 layers on 64 chained sums.
    """

    steps_name: ClassVar[str] = "rl"
    step_size_name: ClassVar[str] = "prompts_per_step"

    eval: RlEvalConfig = Field(default_factory=RlEvalConfig, description="Held-out prompts.")
    task: TaskConfig = Field(default_factory=TaskConfig, description="Prompts and rewards.")
    warmup: WarmupConfig = Field(default_factory=WarmupConfig, description="The supervised start.")
    rl: RlOptions = Field(description="Steps, groups, advantages and the loss.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The engine.")
    # After `engine`: a misplaced max_tokens usually means the length of a rollout.
    sampling: Sampling = Field(default_factory=Sampling, description="How tokens are drawn.")
    history: DraftOptions = Field(default_factory=DraftOptions, description="Memory and drafts.")
    metrics: RlMetricsConfig = Field(default_factory=RlMetricsConfig, description="Where metrics go.")
    run: RlRunConfig = Field(default_factory=RlRunConfig, description="The output.")
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig, description="The processes.")
    schedule: Schedule = Field(default="histopipe", description="With workers: policy that places and orders rollouts.")

    @property
    def options(self) -> RlOptions:
        """[rl] with the settings of other sections that its steps need."""
        return self.rl.changed(sampling=self.sampling, **self.options_elsewhere)

    @property
    def task_options(self) -> TaskConfig:
        """[task] with the settings of other sections that it needs."""
        judge = self.task.judge.model_copy(update={"time_limit_s": self.runtime.reward_time_limit_s})
        return self.task.model_copy(update={"max_rows": self.engine.max_batch, "judge": judge})

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.rl.kl > 0 and self.lora.is_set and self.warmup.num_steps > 0:
            raise ConfigError(
                f"with [lora] the reference of rl.kl = {self.rl.kl} is the base model, and warmup.num_steps = "
                f"{self.warmup.num_steps} would move the policy away before the first step; set warmup.num_steps = 0"
            )
        has_solutions = self.task.kind != "prompts" and not self.task.runs_episodes
        if not has_solutions and self.warmup.num_steps > 0:
            raise ConfigError(
                f'warmup needs solutions, and task.kind = "{self.task.kind}" has none; set warmup.num_steps = 0, '
                "and start from a model trained with `treering sft`"
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
        teacher, is_distilled = self.teacher, self.rl.objective == "distill"
        if is_distilled and teacher.path is None:
            raise ConfigError(
                'rl.objective = "distill" needs a teacher, and teacher.path is not set; set it to a Hugging Face model '
                "folder"
            )
        if teacher.is_set and is_distilled != (teacher.weight is None):
            raise ConfigError(
                "teacher.weight adds the divergence to another objective, got rl.objective = "
                f'"{self.rl.objective}" with teacher.weight = {teacher.weight}; set rl.objective = "distill" without a '
                "weight, or another with one"
            )
        if self.teacher.is_set and self.runtime.workers > 0:
            raise ConfigError(
                f"a teacher runs in the process of the loop, got runtime.workers = {self.runtime.workers}; set "
                "runtime.workers=0"
            )
        own = ("clip", "max_importance", "entropy_coefficient")
        given = [name for name in own if getattr(self.rl, name) is not None]
        if self.rl.objective == "distill" and given:
            raise ConfigError(
                f'rl.objective = "distill" has no ratio and no entropy bonus, got {", ".join(given)}; remove it, or '
                "set "
                "another objective with teacher.weight"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        engine = self.engine
        if engine.kind == "torch" and engine.verification != "rejection":
            raise ConfigError(
                'engine.verification is only for engine.kind = "vllm"; "torch" always gives the same tokens as without '
                "drafts; remove it"
            )
        if engine.kind == "vllm":
            check_vllm(engine, self.sampling, old_logprobs=self.rl.old_logprobs)
        given = engine.verification, self.history.drafts
        if engine.kind == "vllm" and self.rl.rehearse == "on" and given != ("exact", "on"):
            raise ConfigError(
                'rl.rehearse = "on" draws rehearsed tokens again with their own noise, which vLLM does only with '
                f'engine.verification = "exact" and history.drafts = "on", got {given}; set both, or rehearse = "off"'
            )
        return self

    @model_validator(mode="after")
    def _check_eval(self) -> Self:
        if self.eval.file is not None and self.task.kind != "prompts":
            raise ConfigError(
                f'task.kind = "{self.task.kind}" reads no prompts file, got eval.file; set eval.share instead'
            )
        if self.eval.is_set and self.engine.kind == "vllm":
            raise ConfigError(
                'evaluations use the engine of this process, got engine.kind = "vllm"; remove [eval], and '
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
                f"task.max_turn_tokens must be at most sampling.max_tokens = {self.sampling.max_tokens}, which "
                f"bounds a context with its turn, got {self.task.max_turn_tokens}; raise the one, or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        if self.rl.staleness > 0 and self.runtime.workers == 0:
            raise ConfigError(
                f"overlapping steps need worker processes, got rl.staleness = {self.rl.staleness} without any; set "
                "runtime.workers=1 or more, or rl.staleness=0"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        rl = self.options
        if rl.overlong_buffer is not None and self.task.runs_episodes:
            raise ConfigError(
                f"overlong_buffer is for responses, got {rl.overlong_buffer} with the episodes of task.kind = "
                f'"{self.task.kind}"; remove it'
            )
        if rl.max_gen_batches > 1 and self.runtime.workers > 0:
            raise ConfigError(
                f"workers sample steps ahead, but with rl.max_gen_batches = {rl.max_gen_batches} a step's rewards "
                "decide which prompts come next; set runtime.workers=0, or rl.max_gen_batches=1"
            )
        return self
