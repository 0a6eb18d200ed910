"""Checks every file of a run folder, and says what the next start of the run would do; changes nothing."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treering.cli.run_folder import COSTS_FILE, HISTORY_FOLDER
from treering.errors import InputError, TreeringError
from treering.files.atomic import read_facts
from treering.files.json_object import read_object
from treering.files.step_lines import read_rows, spans
from treering.history.store.snapshot import read_saved
from treering.report.rollouts import ROLLOUTS_FOLDER
from treering.report.run import CONFIG_FILE
from treering.train.loop.checkpoint import CHECKPOINT_NAME, check_identity
from treering.train.loop.run import CHECKPOINTS_FOLDER, METRICS_FILE, RUN_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file or checkpoint.

    Attributes:
        name: its path within the run folder.
        damage: what is wrong with it; None if it is whole.
        words: what it holds.
    """

    name: str
    damage: str | None
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run folder.

    Attributes:
        files: every file that the run reads or writes.
        resume: what the next start does.
        checkpoints: the whole ones, newest first.
    """

    files: tuple[FileReport, ...]
    resume: str
    checkpoints: tuple[Path, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged."""
        return all(file.damage is None for file in self.files)


def check_run(folder: Path) -> RunReport:
    """Checks a run folder.

    Raises:
        InputError: no folder of a run.

    Example: a run of 20 steps with checkpoints at 10 and 20, of which the second is cut short, resumes after step 10.
    """
    if not (folder / RUN_FILE).exists() and not (folder / CHECKPOINTS_FOLDER).exists():
        raise InputError(f"a run folder holds {RUN_FILE} or {CHECKPOINTS_FOLDER}/, and {folder} has neither; name one")
    checkpoints = sorted((folder / CHECKPOINTS_FOLDER).glob("step-*"), reverse=True)
    checkpoints = [path for path in checkpoints if CHECKPOINT_NAME.fullmatch(path.name)]
    reports = {path: _checked(folder, path, partial(_checkpoint, folder, path)) for path in checkpoints}
    whole = tuple(path for path, report in reports.items() if report.damage is None)
    settings = [
        _checked(folder, folder / name, partial(_settings, folder / name))
        for name in (RUN_FILE, CONFIG_FILE, COSTS_FILE)
        if (folder / name).exists()
    ]
    logs = [folder / METRICS_FILE, *sorted((folder / ROLLOUTS_FOLDER).glob("epoch-*.jsonl"))]
    lines = [_checked(folder, log, partial(_log, log)) for log in logs if log.exists()]
    saved = sorted((folder / HISTORY_FOLDER).glob("step-*"))
    histories = [_checked(folder, file, partial(_history, file)) for file in saved]
    files = (*settings, *lines, *reports.values(), *histories)
    return RunReport(files=files, resume=_resume(folder, whole, len(checkpoints)), checkpoints=whole)


def _checked(folder: Path, path: Path, check: Callable[[], str]) -> FileReport:
    name = str(path.relative_to(folder))
    try:
        return FileReport(name=name, damage=None, words=check())
    except (TreeringError, OSError, ValueError, EOFError, LookupError) as error:
        return FileReport(name=name, damage=" ".join(str(error).split()))


def _settings(file: Path) -> str:
    return f"{len(read_object(file))} entries"


def _checkpoint(folder: Path, path: Path) -> str:
    facts = read_facts(path)
    if (folder / RUN_FILE).exists():
        check_identity(facts["identity"], read_object(folder / RUN_FILE), where=path)
    return f"step {facts['step']}, checksums right"


def _history(file: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = read_saved(file)
    if caught:
        raise ValueError(f"{caught[0].message}; it costs speed alone")
    return f"{len(prompts)} prompts"


def _log(file: Path) -> str:
    """Its steps in words.

    Raises:
        ValueError: lines that cannot be read; an unfinished last one is what a kill leaves, and no damage.
    """
    lines = file.read_bytes().split(b"\n")
    num_whole = sum(1 for line in lines[:-1] if line)
    rows = list(read_rows(file))
    if len(rows) < num_whole:
        raise ValueError(f"{num_whole - len(rows)} of {num_whole} lines cannot be read")
    unfinished = ", and an unfinished one" if lines[-1] else ""
    return f"{len(rows)} lines of steps {spans({row['step'] for row in rows})}{unfinished}"


def _resume(folder: Path, whole: tuple[Path, ...], num_checkpoints: int) -> str:
    logged = max((row["step"] for row in read_rows(folder / METRICS_FILE)), default=0)
    if not whole:
        if num_checkpoints:
            return "it does not start: every checkpoint is damaged; restore one from a copy, or remove the run folder"
        again = f"; steps 1 to {logged} are trained again" if logged else ""
        return f"it begins with step 1, since there is no checkpoint{again}"
    step = int(read_facts(whole[0])["step"])
    again = f"; steps {step + 1} to {logged} are trained again, with the same result" if logged > step else ""
    return f"it goes on after step {step}, from {whole[0].name}{again}"
