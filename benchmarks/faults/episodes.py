"""Faults of runs whose rollouts are episodes: kills of the run, and of an environment's processes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.tiny_model import TINY_MODEL
from benchmarks.faults.cases import Case, Kind, killed
from benchmarks.faults.judge import Verdict
from benchmarks.faults.processes import child_killed, child_pids, command_of
from benchmarks.faults.task import SETTINGS, undisturbed
from treering.rl.environments import Environment, EnvTask
from treering.rl.environments.policy_calls import Policy

_TASK = """
[task]
kind = "environment"
env = "benchmarks.faults.episodes:Letters"
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
    task, run_s = undisturbed(case.folder.parent, case.server, _episodes(case).task, "episodes")
    return killed(replace(case, task=task, run_s=run_s), num_kills)


def _child_killed(case: Case, name: str, find: Callable[[int], list[int]], overrides: tuple[str, ...]) -> Verdict:
    return child_killed(_episodes(case), name, find, overrides)


def _tools_of(pid: int) -> list[int]:
    """The processes that the environment has started."""
    return [child for child in child_pids(pid) if command_of(child).startswith("sh\0")]


def _episodes(case: Case) -> Case:
    """The same with a run of episodes."""
    return replace(case, task=replace(case.task, config=_write_config(case.folder.parent / "episodes.toml")))


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
            overrides=("task.env=benchmarks.faults.episodes:ByProcess",),
        ),
    ),
)
"""Runs of an environment."""
