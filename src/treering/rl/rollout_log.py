"""Writes the rollouts of a run to trajectory files, one per epoch."""

import re
from collections.abc import Iterable
from pathlib import Path

from treering.data import Trajectory, append_trajectories
from treering.errors import StateError
from treering.metrics import cut_rows

_NAME = re.compile(r"epoch-\d{3,}\.jsonl")


class RolloutLog:
    """Files `epoch-000.jsonl` etc. in one folder, one trajectory per line, steps in order.

    Example: after steps 1 to 3, with two steps per epoch, `epoch-000.jsonl` has the lines of steps 1 and 2, and
    `epoch-001.jsonl` those of step 3. Reopened with `resume_step=1`, the first has step 1 and the second is deleted.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """`resume_step`: the last step to keep; later lines are cut off. None means a new run.

        Raises:
            StateError: a new run finds existing files.
        """
        self._folder = folder
        files = [file for file in sorted(folder.glob("epoch-*.jsonl")) if _NAME.fullmatch(file.name)]
        if resume_step is None and files:
            raise StateError(
                f"a new run starts without rollouts, and {files[0]} is there; choose another run folder, or remove it"
            )
        for file in files:
            cut_rows(file, resume_step or 0)
            if file.stat().st_size == 0:
                file.unlink()

    def write(self, epoch: int, trajectories: Iterable[Trajectory]) -> None:
        """Appends the trajectories of one step; each has its step number."""
        append_trajectories(self._folder / f"epoch-{epoch:03d}.jsonl", trajectories)
