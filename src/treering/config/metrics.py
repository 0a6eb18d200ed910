"""The [metrics] section of every subcommand that trains: which sinks get the metrics of each step."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
from treering.config.values import Count
from treering.errors import ConfigError

SinkName = Literal["jsonl", "tensorboard", "wandb", "trackio", "mlflow"]


class MetricsConfig(Config):
    """Where the metrics of each step go."""

    sinks: Annotated[tuple[SinkName, ...], Field(strict=False)] = Field(
        default=("jsonl",),
        description="Where metrics go, each sink at most once. jsonl: metrics.jsonl, which `treering report` and "
        "`treering watch` read. The others are extras of the same name.",
    )
    project: str = Field(default="treering", description="Project or experiment of wandb, trackio and mlflow.")

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
        description="Rollouts per table (prompt, completion, reward, advantage) in the trackers, from the worst reward "
        "to the best; 0: none, so that no text leaves the run's folder.",
    )
    log_completions_every: Count = Field(default=10, description="Steps between these tables; the first step has one.")
