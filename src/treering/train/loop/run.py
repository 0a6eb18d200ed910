"""A training loop with a run folder, so that it can be killed at any moment and resumed.

Each step is trained, then logged, then saved.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from treering.errors import Interrupted, StateError
from treering.files.atomic import write_text
from treering.files.step_lines import read_rows
from treering.files.writing import check_regular, writing
from treering.metrics import Metrics
from treering.train.loop.checkpoint import CheckpointStore, Identity, check_identity
from treering.train.loop.held_out import Evaluation
from treering.train.loop.interruption import Interruption
from treering.train.loop.resumable import ReportT, Resumable
from treering.train.loop.saving import Saved, Saver

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An opened run folder.

    Attributes:
        is_new: whether the folder was just created.
        step: steps already done; also 0 for a run that was killed before its first checkpoint.
    """

    is_new: bool
    step: int

    @property
    def resume_step(self) -> int | None:
        """`step` for metric sinks; None for a new run."""
        return None if self.is_new else self.step


def open_run(folder: Path, loop: Resumable[ReportT], checkpoints: CheckpointStore) -> Opened:
    """Creates the folder of a new run, or loads the newest checkpoint of an existing one into the loop.

    A run that ended before its first step, such as one with a setting that its engine refuses, has nothing to resume:
    the next start may have other settings.

    Raises:
        StateError: the run there has other settings or only damaged checkpoints, or the folder holds metrics of another
            run or cannot be written.
    """
    if checkpoints.group.rank > 0:
        # Rank 0 looks after the folder.
        step = checkpoints.restore_newest(loop)
        return Opened(is_new=step is None, step=step or 0)
    file = folder / RUN_FILE
    is_new, has_begun = not file.exists(), _has_begun(folder, checkpoints)
    if has_begun and not is_new:
        check_identity(_read(file), checkpoints.identity, where=folder)
    step = checkpoints.restore_newest(loop)
    if is_new and step is None:
        _check_free(folder)
    if is_new or not has_begun:
        _begin(folder, checkpoints.identity)
    return Opened(is_new=is_new and step is None, step=step or 0)


def run_steps(
    loop: Resumable[ReportT],
    *,
    num_steps: int,
    save_every: int | timedelta | None,
    checkpoints: CheckpointStore,
    metrics: Metrics,
    on_step: Callable[[ReportT], Mapping[str, float] | None] | None = None,
    evaluation: Evaluation | None = None,
    interruption: Interruption | None = None,
    on_saved: Callable[[Saved], None] | None = None,
) -> Iterator[ReportT]:
    """Runs steps up to `num_steps` and yields each step's report after it has been logged and, if due, saved.

    If a signal ends a step, that step is dropped and the one before it is saved, from which the next start goes on.

    Args:
        loop: after `open_run`.
        num_steps: of the whole run; the last one is always saved.
        save_every: steps between checkpoints, or the time, which becomes longer where saving takes more than a
            twentieth of it; None saves only the last step.
        checkpoints: where to save.
        metrics: opened with `Opened.resume_step`.
        on_step: logs other data than metrics, and may return metrics of what it logged; called before the step is
            saved, so that no checkpoint is ahead of a log.
        evaluation: measures held-out data; what it finds before the first step is logged as step 0.
        interruption: through which a signal ends the run; the loop's `on_progress` is one that it has checked.
        on_saved: hears of each checkpoint.

    Raises:
        Interrupted: a signal ended the run.

    Example: num_steps=5 and save_every=2 save after steps 2, 4 and 5.
    """
    saver = Saver(loop, checkpoints, save_every, interruption, on_saved)
    left_out: Interrupted | None = None

    def measured(step: int) -> dict[str, float]:
        nonlocal left_out
        try:
            return {} if evaluation is None else evaluation.at(step, num_steps, loop.on_progress)
        except Interrupted as error:
            if interruption is None or not interruption.is_requested:
                raise
            # The step is logged first, and saved where the next one would begin.
            left_out = error
            return {}

    if loop.num_steps_done == 0 and (first := measured(0)):
        metrics.log(0, first)
    while loop.num_steps_done < num_steps:
        report = saver.step()
        logged = None if on_step is None else on_step(report)
        metrics.log(report.step, {**report.values(), **(logged or {}), **measured(report.step)})
        saver.save_if_due(is_last=report.step == num_steps)
        yield report
    if left_out is not None:
        left_out.add_note(f"step {num_steps} is saved, and was not evaluated")
        raise left_out


def knows_first(folder: Path) -> bool:
    """Whether an earlier start of a run has logged the evaluation before its first step, as step 0."""
    return any(row["step"] == 0 for row in read_rows(folder / METRICS_FILE))


def _has_begun(folder: Path, checkpoints: CheckpointStore) -> bool:
    metrics = folder / METRICS_FILE
    return checkpoints.folder.exists() or (metrics.exists() and metrics.stat().st_size > 0)


def _begin(folder: Path, identity: Identity) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN_FILE, identity)


def _check_free(folder: Path) -> None:
    """Refuses a folder that holds metrics of an unknown run, which the next start would truncate."""
    file = folder / METRICS_FILE
    if file.exists() and file.stat().st_size > 0:
        raise StateError(
            f"a new run starts in a folder without one, and {file} holds rows of another run; choose another run "
            "folder, or remove the file"
        )


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON object to a file atomically.

    Raises:
        StateError: the file cannot be written.

    Example: `write_json(Path("run.json"), {"seed": 0})` writes a `run.json` of three lines.
    """
    text = json.dumps(dict(content), indent=1)
    with writing(file, len(text)):
        write_text(file, text)


def _read(file: Path) -> dict[str, str | int | float | bool | None]:
    try:
        check_regular(file)
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StateError(
            f"{file} tells which run lives in a folder, and it cannot be read ({error}); remove it and the run goes on "
            "from its checkpoints, or choose another run folder"
        ) from error
