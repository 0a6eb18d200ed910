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
        description="Run folder: settings, metrics.jsonl, checkpoints; of `train` also history and rollouts.",
    )
    save_every: CountOrTime = Field(
        default="10min",
        description="Steps between checkpoints, or a time: then less often where saving would take more than a "
        "twentieth of it. The last step is saved in any case, and the last whole one at Ctrl-C.",
    )
    keep: Count = Field(default=2, description="Checkpoints to keep, the newest ones.")

    @property
    def save_interval(self) -> int | timedelta:
        """`save_every` as a number of steps, or as a time."""
        every = self.save_every
        return every if isinstance(every, int) else timedelta(seconds=seconds_in(every))
