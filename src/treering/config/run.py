"""The [run] section of every subcommand that trains: where it writes, and how often."""

from pathlib import Path

from pydantic import Field

from treering.config.load import Config
from treering.config.values import Count, FilePath


class RunConfig(Config):
    """Where a run writes, and how often."""

    dir: FilePath = Field(
        default=Path("runs/sft"), description="Run folder: checkpoints, metrics.jsonl, TensorBoard files."
    )
    save_every: Count | None = Field(default=None, description="Steps between checkpoints; none: one at the end.")
    keep: Count = Field(default=2, description="Checkpoints to keep, the newest ones.")
