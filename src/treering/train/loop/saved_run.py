"""Run a training loop in a run folder, so that it can be killed at any moment and resumed.

Each step is trained, then logged, then saved. A signal ends a run at the next point where nothing is lost.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic

from treering.errors import Interrupted, StateError
from treering.files.step_lines import read_rows
from treering.files.writing import check_regular, write_text, writing
from treering.metrics import METRICS_FILE, Metrics
from treering.ranks.group import RankGroup
from treering.train.loop.checkpoint import (
    CheckpointStore,
    Identity,
    ReportT,
    Resumable,
    check_identity,
    random_state,
    set_random_state,
)
from treering.train.loop.held_out import Evaluation
from treering.train.progress import OnProgress, Phase


class Interruption:
    """Request to end a run, granted at the next point where the running step can be dropped.

    A single process drops its step between micro-batches, or between two steps of its engine. Several ranks finish
    their step and agree at its end, because a pass that one of them skips would make the others wait.

    Example: after `request(signal.SIGTERM)` during the third step of a run that has saved its first, `check` raises
    `Interrupted(signal.SIGTERM)`, and `run_steps` saves the second.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        """Serve `rank_group`, the ranks that train together."""
        self.has_unsaved: Callable[[], bool] = lambda: False
        """Whether ending now would lose a whole step; set by the run."""
        self._rank_group = rank_group
        self._number: int | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a request is waiting."""
        return self._number is not None

    def request(self, signal_number: int) -> bool:
        """Ask for the end, from any thread; return whether to wait for it.

        If every whole step is saved, ending at once loses nothing; with several ranks, none knows about the others.
        """
        if self._number is None and (self._rank_group.size > 1 or self.has_unsaved()):
            self._number = signal_number
        return self.is_requested

    def check(self) -> None:
        """Raise the request, if there is one.

        Raises:
            Interrupted: the end was requested.
        """
        if self._number is not None:
            raise Interrupted(self._number)

    def as_error(self) -> Interrupted:
        """Return the request as an error; there must be one."""
        assert self._number is not None, "the end was asked for"
        return Interrupted(self._number)

    def check_together(self) -> None:
        """Call `check` on all ranks with the same outcome; between steps."""
        if self._rank_group.size > 1:
            self._number = next(
                (number for number in self._rank_group.gather(self._number) if number is not None), None
            )
        self.check()

    def checked(self, on_progress: OnProgress) -> OnProgress:
        """Wrap an `on_progress` so that, in a single process, the step can also end there."""
        if self._rank_group.size > 1:
            return on_progress

        def check_and_report(phase: Phase, num_done: int, num_total: int) -> None:
            self.check()
            on_progress(phase, num_done, num_total)

        return check_and_report


MAX_SHARE = 0.05
"""Upper bound on the share of a run that saving by time takes."""


class Saver(Generic[ReportT]):
    """Runner of a loop's steps that saves the loop when a save is due or a signal ends the run.

    Example: with `timedelta(minutes=10)`, ten minutes lie between two saves of 0.4 s, and nineteen between two of 60 s.
    """

    def __init__(
        self,
        loop: Resumable[ReportT],
        checkpoints: CheckpointStore,
        every: int | timedelta | None,
        interruption: Interruption | None,
    ) -> None:
        """Start with the loop in the state of its newest checkpoint; for arguments, see `run_steps`."""
        self._loop = loop
        self._checkpoints = checkpoints
        self._every = every
        self._interruption = interruption
        self._step = loop.num_steps_done
        self._ended_s = time.monotonic()
        self._seconds = 0.0
        if interruption is not None:
            interruption.has_unsaved = lambda: loop.num_steps_done > self._step

    def step(self) -> ReportT:
        """Run the next step; if a signal ends it, save the state after the last whole one.

        Raises:
            Interrupted: a signal ended the run; a note names the saved step.
        """
        # Weights and optimizer change once a step is complete, but its random draws change the state at once.
        random = random_state()
        try:
            if self._interruption is not None:
                self._interruption.check_together()
            return self._loop.step()
        except Interrupted as error:
            self._keep(random, error)
            raise
        except Exception as error:
            # Ctrl-C also reaches the processes of an engine, which may fail before the step can be dropped.
            if (
                self._interruption is None
                or not self._interruption.is_requested
                or self._checkpoints.rank_group.size > 1
            ):
                raise
            interrupted = self._interruption.as_error()
            try:
                self._keep(random, interrupted)
            except StateError:
                # The loop cannot be saved after an error.
                raise error from None
            raise interrupted from error

    def _keep(self, random: dict[str, Any], error: Interrupted) -> None:
        """Save the state after the last whole step unless it is saved already, and note the number of that step."""
        if self._loop.num_steps_done > self._step:
            self._loop.model.zero_grad(set_to_none=True)
            set_random_state(random)
            self.save()
        error.add_note(f"step {self._step} is saved and {self._step + 1} is next" if self._step else "no step is done")

    def save(self) -> None:
        """Save the loop."""
        began_s = time.monotonic()
        self._checkpoints.save(self._loop)
        self._ended_s = time.monotonic()
        self._seconds, self._step = self._ended_s - began_s, self._loop.num_steps_done

    def is_due(self) -> bool:
        """Return whether `every` says that a save is due."""
        if not isinstance(self._every, timedelta):
            return self._every is not None and self._loop.num_steps_done % self._every == 0
        wait_s = max(self._every.total_seconds(), self._seconds * (1.0 / MAX_SHARE - 1.0))
        is_due = time.monotonic() >= self._ended_s + wait_s
        # All ranks use the clock of the first.
        return bool(self._checkpoints.rank_group.gather(is_due)[0])


RUN_FILE = "run.json"


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
    """Create the folder of a new run, or load the newest checkpoint of an existing one into the loop.

    A run that ended before its first step, for example because its engine refused a setting, has nothing to resume: the
    next start may use other settings.

    Raises:
        StateError: the run there has other settings or only damaged checkpoints, or the folder holds metrics of another
            run or cannot be written.
    """
    if checkpoints.rank_group.rank > 0:
        # Rank 0 manages the folder.
        step = checkpoints.restore_newest(loop)
        return Opened(is_new=step is None, step=step or 0)
    file = folder / RUN_FILE
    is_new, has_started = not file.exists(), _has_started(folder, checkpoints)
    if has_started and not is_new:
        check_identity(_read(file), checkpoints.identity, where=folder)
    step = checkpoints.restore_newest(loop)
    if is_new and step is None:
        _check_free(folder)
    if is_new or not has_started:
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
) -> Iterator[ReportT]:
    """Run steps up to `num_steps`; yield each step's report after it has been logged and, if due, saved.

    If a signal ends a step, that step is dropped and the previous one is saved, from which the next start continues.

    Args:
        loop: a loop after `open_run`.
        num_steps: steps of the whole run; the last one is always saved.
        save_every: steps between checkpoints, or a time, which is extended if saving takes more than a twentieth of it;
            None saves only the last step.
        checkpoints: store of the checkpoints.
        metrics: sinks, opened with `Opened.resume_step`.
        on_step: logs data other than metrics, and may return metrics about it; called before the step is saved, so that
            no checkpoint is ahead of a log.
        evaluation: measures held-out data; its result before the first step is logged as step 0.
        interruption: request by which a signal ends the run; the loop's `on_progress` must be wrapped by its `checked`.

    Raises:
        Interrupted: a signal ended the run.

    Example: num_steps=5 and save_every=2 save after steps 2, 4 and 5.
    """
    saver = Saver(loop, checkpoints, save_every, interruption)
    left_out: Interrupted | None = None

    def measured(step: int) -> dict[str, float]:
        nonlocal left_out
        try:
            return {} if evaluation is None else evaluation.at(step, num_steps, loop.on_progress)
        except Interrupted as error:
            if interruption is None or not interruption.is_requested:
                raise
            # Log the step first; it is saved where the next one would begin.
            left_out = error
            return {}

    if loop.num_steps_done == 0 and (first := measured(0)):
        metrics.log(0, first)
    while loop.num_steps_done < num_steps:
        report = saver.step()
        logged = None if on_step is None else on_step(report)
        found = measured(report.step)
        metrics.log(report.step, {**report.values(), **(logged or {}), **found})
        is_best = bool(found) and checkpoints.is_best(report.step)
        if is_best or report.step == num_steps or saver.is_due():
            saver.save()
        yield report
    if left_out is not None:
        left_out.add_note(f"step {num_steps} is saved, and was not evaluated")
        raise left_out


def knows_first(folder: Path) -> bool:
    """Return whether an earlier start of the run has logged the evaluation before its first step, as step 0."""
    return any(row["step"] == 0 for row in read_rows(folder / METRICS_FILE))


def _has_started(folder: Path, checkpoints: CheckpointStore) -> bool:
    metrics = folder / METRICS_FILE
    return checkpoints.folder.exists() or (metrics.exists() and metrics.stat().st_size > 0)


def _begin(folder: Path, identity: Identity) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN_FILE, identity)


def _check_free(folder: Path) -> None:
    """Refuse a folder that holds metrics of an unknown run, which the next start would truncate."""
    file = folder / METRICS_FILE
    if file.exists() and file.stat().st_size > 0:
        raise StateError(
            f"a new run needs a folder without metrics, and {file} holds rows of another run; choose another run "
            "folder, or remove the file"
        )


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object to a file atomically.

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
            f"{file}, which identifies the run of its folder, cannot be read ({error}); remove it to continue from the "
            "checkpoints, or choose another run folder"
        ) from error
