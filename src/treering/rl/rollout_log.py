"""Writes the rollouts of a run to trajectory files, one per epoch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from treering import metrics
from treering.data import Trajectory, append_trajectories
from treering.errors import InputError, StateError
from treering.step_lines import reopen
from treering.writing import writing

_NAME = re.compile(r"epoch-\d{3,}\.jsonl")


class RolloutLog:
    """Files `epoch-000.jsonl` etc. in one folder, one trajectory per line, steps in order.

    Example: after steps 1 to 3, with two steps per epoch, `epoch-000.jsonl` has the lines of steps 1 and 2, and
    `epoch-001.jsonl` those of step 3. Reopened with `resume_step=1`, the first has step 1 and the second is deleted.
    """

    def __init__(
        self, folder: Path, *, resume_step: int | None = None, expected: Mapping[int, int | None] | None = None
    ) -> None:
        """Damage to earlier steps is a warning (`treering.step_lines.reopen`).

        Args:
            folder: created with the first step.
            resume_step: the last step to keep; later lines are cut off. None means a new run.
            expected: lines by step, as `treering.metrics.num_logged` gives them; a step that it lacks should have some.

        Raises:
            StateError: a new run finds existing files, or a file cannot be read or written.
        """
        self._folder = folder
        files = [file for file in sorted(folder.glob("epoch-*.jsonl")) if _NAME.fullmatch(file.name)]
        if resume_step is None and files:
            raise StateError(
                f"a new run starts without rollouts, and {files[0]} is there; choose another run folder, or remove it"
            )
        steps = range(1, (resume_step or 0) + 1)
        reopen(files, len(steps), {step: (expected or {}).get(step) for step in steps}, log=folder)

    def write(self, epoch: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Appends the trajectories of one step; each has its step number.

        Returns:
            Their number, as a metric of the step.

        Raises:
            StateError: the disk is full, or the folder cannot be written.
        """
        file = self._folder / f"epoch-{epoch:03d}.jsonl"
        with writing(file):
            try:
                append_trajectories(file, trajectories)
            except InputError as error:
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
                raise
        return {metrics.NUM_LOGGED: len(trajectories)}
