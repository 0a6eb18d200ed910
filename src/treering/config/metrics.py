"""The [metrics] section of every subcommand that trains: which sinks get the metrics of each step."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.errors import ConfigError

SinkName = Literal["jsonl", "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "clearml"]


class MetricsConfig(Config):
    """Where the metrics of each step go."""

    sinks: Annotated[tuple[SinkName, ...], Field(strict=False)] = Field(
        default=("jsonl",),
        description="Where metrics go, each sink at most once. jsonl: metrics.jsonl, which `treering report` reads. "
        "The others are trackers and extras of the same name.",
    )
    project: str = Field(default="treering", description="Project or experiment that trackers show the run in.")

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(
                f"a sink is named once, and sinks = {list(self.sinks)} repeats one; remove the repetition"
            )
        return self


class RlMetricsConfig(MetricsConfig):
    """Where the metrics of each step go, and samples of its rollouts."""

    log_completions: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0,
        description="Rollouts per table (prompt, completion, reward, advantage) in tensorboard, wandb and clearml, "
        "from the worst reward to the best, at the first step and every tenth; 0: none, so that no text leaves the "
        "run's folder.",
    )

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.log_completions and not {"tensorboard", "wandb", "clearml"} & {*self.sinks}:
            raise ConfigError(
                f"tensorboard, wandb and clearml take tables of rollouts, and log_completions = {self.log_completions} "
                f"has sinks = {list(self.sinks)}; add one of them, or set log_completions = 0"
            )
        return self
