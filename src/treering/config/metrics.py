"""The [metrics] section of every subcommand that trains: which sinks get the metrics of each step."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
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
