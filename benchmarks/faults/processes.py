"""Faults of processes: signals, kills of what a run has started, and rewards that attack the process they run in."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.faults.cases import Case, Kind
from benchmarks.faults.judge import Verdict, failure, judge, judge_stop
from benchmarks.faults.rewards import ALWAYS, HARMLESS, RAISING, write_task
from benchmarks.faults.runs import Ended
from benchmarks.faults.task import arguments, undisturbed

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.01


def _signalled(case: Case, number: signal.Signals) -> Verdict:
    """Ended by a signal at a random moment, and resumed."""
    command = arguments(case.task, case.run)
    run = case.server.start(command)
    time.sleep(case.random.uniform(0.0, case.run_s))
    run.send(number)
    wrong = _judge_end(case.run, run.end(), number)
    return wrong or judge(case.task, case.run, case.server.start(command).end())


def _judge_end(folder: Path, ended: Ended, number: signal.Signals) -> Verdict | None:
    if ended.code not in (0, -number, 128 + number):
        return failure(f"{number.name} ended it with exit code {ended.code}: {ended.stderr[-200:]!r}")
    # Before the program has begun, and after its result, a signal has its usual effect, without a line.
    return None if ended.code == -number else judge_stop(folder, ended)


def child_killed(case: Case, name: str, find: Callable[[int], list[int]], overrides: Sequence[str]) -> Verdict:
    """Processes of the run are killed at random moments, again and again; the run ends by itself, with nothing lost."""
    task, _ = undisturbed(case.folder.parent, case.server, case.task, name, overrides)
    run = case.server.start([*arguments(task, case.run), *overrides])
    deadline, num_kills = time.monotonic() + 60.0, case.random.randrange(1, 4)
    while num_kills and time.monotonic() < deadline and Path(f"/proc/{run.pid}").exists():
        time.sleep(_POLL_S)
        victims = find(run.pid)
        if victims and case.random.random() < 0.2:
            os.kill(case.random.choice(victims), signal.SIGKILL)
            num_kills -= 1
    # The rollouts that share a batch, and so the rounding, depend on when processes answer.
    return judge(task, case.run, run.end(), may_round=True)


def child_pids(pid: int) -> list[int]:
    """The processes that a process has started, and that live; none if it has ended."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return found


def command_of(pid: int) -> str:
    """The arguments of a process, each with a zero byte after it; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _rewarded(case: Case, name: str) -> Verdict:
    """A reward does something to its process for some rollouts, or for all."""
    task = replace(case.task, config=write_task(case.folder.parent))
    if name != ALWAYS:
        like = "honest" if name in HARMLESS else "raises"
        task, _ = undisturbed(case.folder.parent, case.server, task, like, [_by(like)])
    ended = case.server.start([*arguments(task, case.run), _by(name)]).end()
    if name != ALWAYS:
        return judge(task, case.run, replace(ended, stderr=_without_reward_warnings(ended.stderr)))
    if ended.code == 0 or f"benchmarks.faults.rewards:{name}" not in ended.stderr:
        return failure(f"a reward that never works ended with {ended.code}: {ended.stderr[-200:]!r}")
    return judge(task, case.run, ended)


def _by(name: str) -> str:
    return f"task.reward=benchmarks.faults.rewards:{name}"


def _without_reward_warnings(stderr: str) -> str:
    """These count rewards that raised, which the undisturbed run has too."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "rewards raised; prompt" not in line)


SIGNALLED = tuple(
    Kind(name="a signal at a random moment", detail=number.name, happen=partial(_signalled, number=number))
    for number in SIGNALS
)
REWARDED = tuple(
    Kind(name="a hostile reward", detail=name, happen=partial(_rewarded, name=name))
    for name in (*HARMLESS, *RAISING, ALWAYS)
)
