"""The [run] section of every subcommand that trains: where it writes, and how often."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
from treering.config.values import Count, FilePath
from treering.errors import ConfigError


class RunConfig(Config):
    """Where a run writes, and how often."""

    dir: FilePath = Field(
        default=Path("runs/sft"), description="Run folder: checkpoints, metrics.jsonl, TensorBoard files."
    )
    save_every: Count | None = Field(default=None, description="Steps between checkpoints; none: one at the end.")
    keep: Count = Field(default=2, description="Checkpoints to keep, the newest ones.")
    log: Annotated[tuple[Literal["jsonl", "tensorboard"], ...], Field(strict=False)] = Field(
        default=("jsonl",), description="Where metrics go, each sink at most once."
    )

    @model_validator(mode="after")
    def _check_log(self) -> Self:
        if len(set(self.log)) < len(self.log):
            raise ConfigError(f"a sink is named once, and log = {list(self.log)} repeats one; remove the repetition")
        return self
