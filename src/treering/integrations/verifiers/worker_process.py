"""Run verifiers in a child process: exchange records with it, and stop it with everything that it started."""

import json
import os
import signal
import subprocess
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from treering.errors import ConfigError, StateError

_CLEAN_UP_S = 25.0
"""Seconds that a cancelled episode has to clean up; below `CLEAN_UP_S` of the loop, which awaits the answer."""
_END_S = _CLEAN_UP_S + 5.0
"""Seconds that the process has to exit by itself."""
_MARK = "TREERING_VERIFIERS"
_LAST_LINES = 20
_MAX_LINE = 500

Record = Mapping[str, Any]


class WorkerProcess:
    """Child process that runs episodes on request.

    Example:
        >>> worker = WorkerProcess(["python", "worker.py"])                                     # doctest: +SKIP
        >>> worker.start({"env": "kuhn_poker", "settings": {}}, time_limit_s=300)["tasks"]      # doctest: +SKIP
        >>> worker.run("0", {"key": "a", "salt": "a|0|0"}).result()["ok"]                       # doctest: +SKIP
        True
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process.

        Raises:
            ConfigError: the program does not exist.
        """
        mark = uuid.uuid4().hex
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, _MARK: mark},
            )
        except OSError as error:
            raise ConfigError(
                f"task.python is the path of an interpreter, got {command[0]!r} ({error.strerror}); correct it"
            ) from error
        self._lock = threading.Lock()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._has_ended = False
        self._started: Future[Record] = Future()
        self._episodes: dict[str, Future[Record]] = {}
        self._finalizer = weakref.finalize(self, _end_all, self._process, mark)
        for target in (self._read_records, self._read_lines):
            threading.Thread(target=target, name="treering-verifiers", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the process still takes records."""
        return not self._has_ended

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def start(self, record: Record, *, time_limit_s: float) -> Record:
        """Load an environment; return its `tasks` record.

        Raises:
            ConfigError: the process refuses the settings; the message is the process's.
            StateError: the process dies, or exceeds the time limit.
        """
        self.send({"type": "start", **record})
        try:
            answer = self._started.result(time_limit_s)
        except TimeoutError:
            raise StateError(f"the environment did not load within {time_limit_s:g} s{self._last_line()}") from None
        if answer["type"] == "refused":
            raise ConfigError(f"task.env: {answer['error']}")
        return answer

    def run(self, episode: str, record: Record) -> "Future[Record]":
        """Start an episode; the future gets its `result` record, or StateError if the process dies first."""
        answer: Future[Record] = Future()
        with self._lock:
            self._episodes[episode] = answer
        try:
            self.send({"type": "run", "episode": episode, **record})
        except StateError as error:
            self._answer(episode, error)
        return answer

    def cancel(self, episode: str) -> None:
        """Cancel an episode; kill the process if it does not answer in time because something blocks it."""
        with self._lock:
            answer = self._episodes.get(episode)
        if answer is None:
            return
        with suppress(StateError):
            self.send({"type": "cancel", "episode": episode})
        patience = threading.Timer(_CLEAN_UP_S, self._kill_unless_answered, [episode])
        patience.daemon = True
        patience.start()

    def send(self, record: Record) -> None:
        """Write a record.

        Raises:
            StateError: the process has ended.
        """
        line = json.dumps(record).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):
            self._has_ended = True
            raise self._death() from None

    def close(self) -> None:
        """Stop the process and kill what it started."""
        self._finalizer()

    def _kill_unless_answered(self, episode: str) -> None:
        with self._lock:
            is_open = episode in self._episodes
        if is_open:
            self._last_lines.append("it did not react to a cancelled episode and was killed")
            self._process.kill()

    def _read_records(self) -> None:
        with _pipe(self._process.stdout) as lines:
            for line in lines:
                self._take(json.loads(line))
        self._has_ended = True
        self._process.wait()
        death = self._death()
        if not self._started.done():
            self._started.set_exception(death)
        for episode in list(self._episodes):
            self._answer(episode, death)

    def _take(self, record: Record) -> None:
        if record["type"] == "result":
            self._answer(record["episode"], record)
        elif not self._started.done():
            self._started.set_result(record)

    def _answer(self, episode: str, result: Record | StateError) -> None:
        with self._lock:
            answer = self._episodes.pop(episode, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if isinstance(result, StateError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _read_lines(self) -> None:
        with _pipe(self._process.stderr) as lines:
            for line in lines:
                if line.strip():
                    self._last_lines.append(line[:_MAX_LINE].decode(errors="replace").strip())

    def _death(self) -> StateError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return StateError(f"the process of verifiers ended with status {self._process.returncode}{self._last_line()}")

    def _last_line(self) -> str:
        return f"; its last line: {self._last_lines[-1]}" if self._last_lines else ""


def worker_command(python: str) -> list[str]:
    """Return the command that starts the worker in an interpreter.

    Example: `worker_command(".venv-env/bin/python")[0]` is ".venv-env/bin/python".
    """
    return [python, str(Path(__file__).with_name("worker.py"))]


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _end_all(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Close a process's input, wait for its exit, then kill it and every process with its mark."""
    with suppress(OSError, ValueError):
        _pipe(process.stdin).close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # Programs of agents run in other process groups.
    for pid in _marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment has a mark; empty where /proc does not exist."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
