"""The [run] section of every subcommand that trains: where it writes, and how often."""

from datetime import timedelta
from pathlib import Path

from pydantic import Field

from treering.config.record import Config
from treering.config.values import Count, CountOrTime, FilePath, seconds_in


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
