"""The [run] and [metrics] sections of every subcommand that trains: what a run writes, where, and how often."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, CountOrTime, FilePath, seconds_in
from treering.errors import ConfigError


class RunConfig(Config):
    """Where a run writes, and how often."""

    dir: FilePath = Field(
        default=Path("runs/sft"),
        description="Run folder: settings, metrics.jsonl, checkpoints; for `train` also history and rollouts.",
    )
    save_every: CountOrTime = Field(
        default="10min",
        description="Steps between checkpoints, or a time; with a time, saving takes at most a twentieth of the run. "
        "The last step is always saved, and at Ctrl-C the last whole one.",
    )
    keep: Count = Field(default=2, description="Number of newest checkpoints to keep.")

    @property
    def save_interval(self) -> int | timedelta:
        """`save_every` as a number of steps, or as a time."""
        every = self.save_every
        return every if isinstance(every, int) else timedelta(seconds=seconds_in(every))


SinkName = Literal["jsonl", "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "clearml"]


class MetricsConfig(Config):
    """Sinks for the metrics of each step."""

    sinks: Annotated[tuple[SinkName, ...], Field(strict=False)] = Field(
        default=("jsonl",),
        description="Sinks for metrics, each at most once. jsonl: metrics.jsonl, which `treering report` reads. The "
        "others are trackers, installed as extras of the same name.",
    )
    project: str = Field(default="treering", description="Project or experiment of the run in trackers.")

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"sinks must be distinct, got {list(self.sinks)}; remove the repetition")
        return self


class RlMetricsConfig(MetricsConfig):
    """Sinks for the metrics of each step, and samples of its rollouts."""

    log_completions: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0,
        description="Rollouts per table (prompt, completion, reward, advantage) in tensorboard, wandb and clearml, "
        "from the worst reward to the best, at the first step and every tenth; 0: no tables, so no text leaves the "
        "run's folder.",
    )

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.log_completions and not {"tensorboard", "wandb", "clearml"} & {*self.sinks}:
            raise ConfigError(
                f"log_completions = {self.log_completions} needs the sink tensorboard, wandb or clearml, got sinks = "
                f"{list(self.sinks)}; add one of them, or set log_completions = 0"
            )
        return self
