"""Starts, kills and waits for runs of `treering train` in the processes of a server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 120.0
"""A run takes a second or two; what takes longer hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: exit code; negative is the signal that killed it.
        stderr: what it said.
        has_hung: whether it was killed because it took too long.
        is_left: whether processes of it were left behind.
    """

    code: int
    stderr: str
    has_hung: bool
    is_left: bool


class Server:
    """The process that runs are forked from; use it in a `with` statement."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            preexec_fn=_take_signals,
        )

    def start(self, arguments: Sequence[str], *, limit: int | None = None) -> "Run":
        """Starts `treering ARGUMENTS`, with a limit on the size of its files in bytes."""
        return Run(self, self._ask({"start": list(arguments), "limit": limit}))

    def warm(self, arguments: Sequence[str]) -> None:
        """Runs a command in the server itself, before the first start."""
        self._ask({"warm": list(arguments)})

    def wait(self, child: int) -> dict[str, Any]:
        """Waits for a process."""
        return dict(self._ask({"wait": child}))

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


class Run:
    """A started process."""

    def __init__(self, server: Server, child: int) -> None:
        self._server, self.pid = server, child

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; to a process that has ended already it does nothing."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, *, kill_after_s: float | None = None) -> Ended:
        """Waits for its end, and kills it after some seconds if it has not come."""
        timer = threading.Timer(TIME_LIMIT_S if kill_after_s is None else kill_after_s, self.kill)
        timer.start()
        answer = self._server.wait(self.pid)
        has_fired = not timer.is_alive()
        timer.cancel()
        return Ended(
            code=answer["code"],
            stderr=answer["stderr"],
            has_hung=kill_after_s is None and has_fired and answer["code"] == -signal.SIGKILL,
            is_left=answer["is_left"],
        )


def is_left(group: int) -> bool:
    """Whether processes of a group that has ended are still there; children of a killed one end by themselves, soon."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.005)
    return True


def _take_signals() -> None:
    """A run that is started in the background, or by nohup, inherits that it ignores some."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
