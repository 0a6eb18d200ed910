import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.rl.runs import TinyTask, share_of_even_tokens
from tests.runtime.in_process import die, hang
from treering.engine.protocol import Rollout
from treering.rl.tasks.task import Prompt, RewardValue


class DeadlyOnce(TinyTask):
    """Task in which the reward worker dies only at the very first reward."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._marker = Path(marker)

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        if not self._marker.exists():
            self._marker.touch()
            die()
        return share_of_even_tokens(rollout)


class Ranking(TinyTask):
    """Task that rewards a group at once: how many of it are no better; the last sample of a group is skipped."""

    rewards_groups = True

    def __init__(self, marker: str | None = None) -> None:
        super().__init__()
        self._marker = None if marker is None else Path(marker)

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[RewardValue | Exception]:
        if self._marker is not None and not self._marker.exists():
            self._marker.touch()
            hang()
        shares = [share_of_even_tokens(rollout) for rollout in rollouts]
        ranks = [float(sum(other <= share for other in shares)) for share in shares]
        return [None if rollout.sample == 3 else rank for rank, rollout in zip(ranks, rollouts, strict=True)]


def fork_and_return() -> None:
    os.fork()


def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait).start()


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "3600"])


def start_and_join_a_process() -> None:
    """Start a process, as rewards with their own time limits do; daemons may not."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    process.start()
    process.join()


def print_in_every_way() -> None:
    print("printed by python")
    os.write(1, b"written to the descriptor\n")
    subprocess.run(["echo", "printed by a process"], check=True)


def leave_by(error: type[BaseException]) -> None:
    raise error("bye")


HARMLESS: Mapping[str, Callable[[], object]] = {
    "forks": fork_and_return,
    "leaves a thread": leave_a_thread,
    "leaves a process": leave_a_process,
    "starts a process": start_and_join_a_process,
    "changes the folder": partial(os.chdir, "/"),
    "prints": print_in_every_way,
    "closes stdout": lambda: sys.stdout.close(),
    "ignores SIGTERM": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
}
"""Actions of a reward that have no effect on its run."""

RAISING: Mapping[str, Callable[[], object]] = {
    "SystemExit": partial(leave_by, SystemExit),
    "KeyboardInterrupt": partial(leave_by, KeyboardInterrupt),
    "GeneratorExit": partial(leave_by, GeneratorExit),
}
"""Actions that leave a rollout without a reward, and its worker alive."""

ENDING: Mapping[str, Callable[[], object]] = {
    "crashes": partial(ctypes.string_at, 0),
    "aborts": os.abort,
    "exits with 0": partial(os._exit, 0),
    "exits with 3": partial(os._exit, 3),
    "closes its files": partial(os.closerange, 3, 999),
    "dies": die,
    "hangs": hang,
}
"""Actions that end the process of a reward, or stop it for ever."""


class Doing(TinyTask):
    """Task whose first samples of each group in the first step act, one action each; or all rollouts do the first."""

    def __init__(self, *names: str, always: bool = False) -> None:
        super().__init__()
        self._acts = [{**HARMLESS, **RAISING, **ENDING}[name] for name in names]
        self._always = always

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        if self._always:
            self._acts[0]()
        elif rollout.draw == 0 and rollout.sample < len(self._acts):
            self._acts[rollout.sample]()
        return share_of_even_tokens(rollout)


class Constant(TinyTask):
    """Task whose rewards are all 1.0, so that the weights stay."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        return 1.0
