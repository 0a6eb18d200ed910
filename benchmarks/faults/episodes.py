"""Faults of runs whose rollouts are episodes: kills of the run, of its workers, and of an environment's processes."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.tiny_model import TINY_MODEL
from benchmarks.faults.cases import Case, Kind
from benchmarks.faults.judge import Verdict, failure, judge
from benchmarks.faults.processes import FREE_OF_CLOCKS, child_pids, children_of, command_of
from benchmarks.faults.task import SETTINGS, Task, arguments
from treering.rl.environments import Environment, EnvTask
from treering.rl.environments.policy import Policy

_POLL_S = 0.01
_MAX_S = 60.0
_TASK = """
[task]
kind = "environment"
class = "benchmarks.faults.episodes:Letters"
max_turn_tokens = 4
[sampling]
max_tokens = 96
"""


class Letters(Environment):
    """Two turns with a tool between them; it reads no clock."""

    tasks = [EnvTask(id=f"t{i}", data=i) for i in range(4)]  # noqa: RUF012 - as users write it

    async def run(self, task: EnvTask, policy: Policy) -> float:
        """The share of small letters in both turns."""
        question = {"role": "user", "content": str(task.data)}
        first = await policy.chat([question])
        told = {"role": "user", "content": await self.count(first.text)}
        second = await policy.chat([question, first.message, told])
        return _num_letters(first.text + second.text) / 8

    async def count(self, text: str) -> str:
        """The tool: the number of small letters."""
        return str(_num_letters(text))


class ByProcess(Letters):
    """Its tool is a process, which takes its time, and is asked again if it is killed."""

    async def count(self, text: str) -> str:
        """The number of small letters, as the process prints it."""
        while True:
            tool = await asyncio.create_subprocess_exec(
                "sh", "-c", f"sleep 0.02; echo {_num_letters(text)}", stdout=asyncio.subprocess.PIPE
            )
            said, _ = await tool.communicate()
            if tool.returncode == 0:
                return said.decode().strip()


def _num_letters(text: str) -> int:
    return sum(map(str.islower, text))


def _killed(case: Case, num_kills: int) -> Verdict:
    """The run is killed at random moments, and resumed each time."""
    task, run_s = _undisturbed(case, "episodes")
    for _ in range(num_kills):
        ended = case.server.start(arguments(task, case.run)).end(kill_after_s=case.random.uniform(0.0, run_s))
        if "Traceback" in ended.stderr:
            return failure(ended.stderr.splitlines()[-1])
    return judge(task, case.run, case.server.start(arguments(task, case.run)).end())


def _child_killed(case: Case, name: str, find: Callable[[int], list[int]], overrides: tuple[str, ...]) -> Verdict:
    """Processes of the run are killed at random moments; the run ends by itself, with nothing lost."""
    task, _ = _undisturbed(case, name, *overrides)
    run = case.server.start([*arguments(task, case.run), *overrides])
    deadline, num_kills = time.monotonic() + _MAX_S, case.random.randrange(1, 4)
    while num_kills and time.monotonic() < deadline and Path(f"/proc/{run.pid}").exists():
        time.sleep(_POLL_S)
        victims = find(run.pid)
        if victims and case.random.random() < 0.2:
            os.kill(case.random.choice(victims), signal.SIGKILL)
            num_kills -= 1
    # Which rollouts share a batch, and so the rounding, depends on when processes answer.
    return judge(task, case.run, run.end(), may_round=True)


def _tools_of(pid: int) -> list[int]:
    """The processes that the environment has started."""
    return [child for child in child_pids(pid) if command_of(child).startswith("sh\0")]


def _undisturbed(case: Case, name: str, *overrides: str) -> tuple[Task, float]:
    """The run of episodes with an undisturbed one, made by the first case that needs it, and about its seconds."""
    place = case.folder.parent
    task = replace(case.task, config=_write_config(place / "episodes.toml"), whole=place / f"whole-{name}")
    seconds = place / f"{name}.seconds"
    if not seconds.exists():
        started = time.monotonic()
        ended = case.server.start([*arguments(task, task.whole), *overrides]).end()
        if ended.code != 0:
            raise ValueError(f"an undisturbed run ended with {ended.code}: {ended.stderr[-200:]!r}")
        seconds.write_text(str(time.monotonic() - started))
    return task, float(seconds.read_text())


def _write_config(file: Path) -> Path:
    before, after = SETTINGS.format(model=TINY_MODEL).split("[task]")
    file.write_text(f"{before}{_TASK}[rl]{after.partition('[rl]')[2]}")
    return file


EPISODES = (
    *(
        Kind(name="SIGKILL of a run of episodes", detail=detail, happen=partial(_killed, num_kills=count))
        for detail, count in (("once", 1), ("twenty times", 20))
    ),
    Kind(
        name="SIGKILL of processes of a run of episodes",
        detail="tool",
        happen=partial(
            _child_killed,
            name="episodes-with-tools",
            find=_tools_of,
            overrides=("task.class=benchmarks.faults.episodes:ByProcess",),
        ),
    ),
    Kind(
        name="SIGKILL of processes of a run of episodes",
        detail="rollout worker or trainer",
        happen=partial(
            _child_killed,
            name="episodes-in-workers",
            find=partial(children_of, role="rollout worker or trainer"),
            overrides=("runtime.workers=2", *FREE_OF_CLOCKS),
        ),
    ),
)
"""Runs of an environment."""
