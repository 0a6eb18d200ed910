"""The kinds of faults; each is a function of a folder and a seed that says how the run ended."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.faults.damage import FILES, Damage, damage, damages_of
from benchmarks.faults.judge import Verdict, failure, judge, judge_stop
from benchmarks.faults.runs import Server
from benchmarks.faults.task import Task, arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Where a case runs, and what it draws from.

    Attributes:
        server: starts its processes.
        task: what they train.
        folder: of this case alone.
        random: of its seed.
        run_s: seconds that an undisturbed run takes.
        is_full: whether data sets have their full size.
    """

    server: Server
    task: Task
    folder: Path
    random: Random
    run_s: float
    is_full: bool = False

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: a row of the table.
        detail: which of its row.
        happen: lets it happen in a case, and judges.
    """

    name: str
    detail: str
    happen: Callable[[Case], Verdict]

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def killed(case: Case, num_kills: int) -> Verdict:
    """Killed at random moments, and resumed each time."""
    for _ in range(num_kills):
        run = case.server.start(arguments(case.task, case.run))
        ended = run.end(kill_after_s=case.random.uniform(0.0, case.run_s))
        if "Traceback" in ended.stderr:
            return failure(ended.stderr.splitlines()[-1])
    return judge(case.task, case.run, case.server.start(arguments(case.task, case.run)).end())


def _damaged(case: Case, pattern: str, how: Damage) -> Verdict:
    """A run that has ended halfway is damaged, and resumed."""
    shutil.copytree(case.task.half, case.run)
    damage(case.run, pattern, how, case.random)
    ended = case.server.start(arguments(case.task, case.run)).end()
    # Steps that are repeated from an older checkpoint have its history.
    return judge(case.task, case.run, ended, may_round=pattern.startswith("history"))


def _limited(case: Case) -> Verdict:
    """Files may not grow beyond some size; then they may."""
    limit = case.random.choice([100, 400, 1000, 3000, 10_000, 30_000, 60_000])
    stopped = judge_stop(case.run, case.server.start(arguments(case.task, case.run), limit=limit).end())
    return stopped or judge(case.task, case.run, case.server.start(arguments(case.task, case.run)).end())


def _full(case: Case) -> Verdict:
    """A disk of a few pages fills up; then there is space."""
    with small_disk(case.run, f"size={case.random.randrange(4, 100) * 4096}") as grow:
        stopped = judge_stop(case.run, case.server.start(arguments(case.task, case.run)).end())
        grow()
        return stopped or judge(case.task, case.run, case.server.start(arguments(case.task, case.run)).end())


def _read_only(case: Case) -> Verdict:
    """A run that has ended halfway, on a disk that can only be read; then it can be written."""
    with small_disk(case.run, "size=16m") as grow:
        shutil.copytree(case.task.half, case.run, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", "tmpfs", str(case.run)], check=True)
        ended = case.server.start(arguments(case.task, case.run)).end()
        grow()
        stopped = failure("it ran on a disk that cannot be written") if ended.code == 0 else judge_stop(case.run, ended)
        return stopped or judge(case.task, case.run, case.server.start(arguments(case.task, case.run)).end())


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Callable[[], object]]:
    """A new folder that is its own disk, and a call that makes it larger and writable."""
    folder.mkdir()
    mount = "mount", "-t", "tmpfs", "-o"
    subprocess.run([*mount, options, "tmpfs", str(folder)], check=True)
    try:
        yield lambda: subprocess.run([*mount, "remount,rw,size=16m", "tmpfs", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _two(case: Case) -> Verdict:
    """A process stands still at a random moment, and a second one trains in its folder; then the first goes on."""
    first = case.server.start(arguments(case.task, case.run))
    time.sleep(case.random.uniform(0.0, case.run_s))
    first.send(signal.SIGSTOP)
    second = case.server.start(arguments(case.task, case.run)).end()
    first.send(signal.SIGCONT)
    verdict = judge(case.task, case.run, first.end())
    if verdict.ending == "failure" or second.code == 0:
        # The first had not begun, or had ended.
        return verdict
    if "a run folder takes one process at a time" not in second.stderr:
        return failure(f"the second ended with {second.code}: {second.stderr[-200:]!r}")
    return judge(case.task, case.run, second)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a small disk."""
    try:
        with small_disk(folder, "size=4096"):
            return True
    except subprocess.CalledProcessError:
        return False


KILLS = (
    Kind(name="SIGKILL at a random moment", detail="once", happen=partial(killed, num_kills=1)),
    Kind(name="SIGKILL at a random moment", detail="three times", happen=partial(killed, num_kills=3)),
)
"""Processes of a run that are killed; other kinds of processes belong here."""

DAMAGED = tuple(
    Kind(name=f"{file} damaged", detail=how, happen=partial(_damaged, pattern=pattern, how=change))
    for file, pattern in FILES.items()
    for how, change in damages_of(pattern).items()
)
LIMITS = (Kind(name="file size limit", detail="then none", happen=_limited),)
DISKS = (
    Kind(name="full disk", detail="then space", happen=_full),
    Kind(name="read-only disk", detail="then writable", happen=_read_only),
)
OTHERS = (Kind(name="two processes in one folder", detail="one stands still", happen=_two),)
