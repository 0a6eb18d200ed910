"""The controller's side of a child process: start it, exchange messages, and replace it when it dies."""

import os
import pickle
import time
from typing import Any

from treering.errors import StateError
from treering.runtime.ipc.child import Failed, Ready, Role, Start
from treering.runtime.ipc.launcher import Ended, Kind, Launcher, Process, Transport

MAX_DEATHS = 5
"""Deaths in a row, without progress in between, that end the run."""

_STOP_POLL_S = 0.01
"""How often `stop` looks whether a child has ended."""


class ChildProcess:
    """A named child process that can be restarted.

    Example: a child killed by SIGKILL yields its sent messages, then `has_died`; `start` starts the next one.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        role: Role,
        launcher: Launcher,
        *,
        time_limit_s: float,
        leads_group: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: used in errors.
            kind: what its launcher reserves for it.
            role: what it runs.
            launcher: starts it.
            time_limit_s: how long it may be silent while it has work; see `end_if_silent`.
            leads_group: the role makes itself the leader of a process group, which `stop` kills as a whole.
        """
        self.name = name
        self._kind = kind
        self._leads_group = leads_group
        self._time_limit_s = time_limit_s
        self._heard_s = time.monotonic()
        self._was_silent = False
        self._role = role
        self._launcher = launcher
        self._process: Process | None = None
        self.num_starts = 0
        """Processes started, which tells one from its replacement; ids of processes on two hosts may be equal."""
        self.num_deaths = 0
        """Deaths in a row, without progress in between."""
        self.is_ready = False

    @property
    def connection(self) -> Transport:
        """The connection to wait for; only while a child runs."""
        assert self._process is not None
        return self._process.transport

    @property
    def pid(self) -> int | None:
        """The child's process id; None if there is no child, or it is on its way."""
        return None if self._process is None else self._process.pid

    def start(self, settings: object) -> None:
        """Starts the child with the settings of its role.

        Raises:
            StateError: it cannot be started.
        """
        self._process = self._launcher.start(self.name, self._kind)
        self.num_starts += 1
        self.is_ready = self._was_silent = False
        self._heard_s = time.monotonic()
        folder = os.getcwd() if self._launcher.shares_host else None
        environment = dict(os.environ) if self._launcher.copies_environment else {}
        self.send(Start(role=self._role, settings=settings, folder=folder, environment=environment))

    def offer(self, version: int, slot: int | None = None) -> None:
        """Lets the child read these weights of the store."""
        if self._process is not None:
            self._process.offer(version, slot)

    def send(self, message: object) -> None:
        """Sends a message. One to a dead child is dropped; `receive` reports the death."""
        try:
            self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            return

    def receive(self) -> tuple[list[Any], bool]:
        """The child's messages, and whether it has died. Messages sent before its death are still valid.

        Raises:
            Exception: the error that the child raised.
        """
        messages: list[Any] = []
        has_died = False
        try:
            # A grandchild may hold the other end of the pipe open, so also check the process itself.
            is_gone = self._process is None or not self._process.is_alive()
            while self.connection.poll():
                messages.append(pickle.loads(self.connection.recv_bytes()))
            has_died = is_gone
        except (EOFError, OSError):
            has_died = True
        if messages:
            self._heard_s = time.monotonic()
        for message in messages:
            if isinstance(message, Failed):
                raise message.error
        self.is_ready = self.is_ready or any(isinstance(message, Ready) for message in messages)
        return [message for message in messages if not isinstance(message, Ready)], has_died

    def end_if_silent(self, *, is_busy: bool) -> None:
        """Kills a child that has work, or is not ready, and has sent nothing within its time limit.

        `receive` reports its death. Call it after every `receive`.
        """
        now_s = time.monotonic()
        if self.is_ready and not is_busy:
            self._heard_s = now_s
        elif self._process is not None and now_s > self._heard_s + self._time_limit_s:
            self._was_silent = True
            self._process.kill()

    def reap(self) -> Ended:
        """Cleans up a dead child and returns how it ended.

        Raises:
            StateError: it is the `MAX_DEATHS`-th in a row.
        """
        ended = self.stop()
        self.num_deaths += 1
        if self.num_deaths < MAX_DEATHS:
            return ended
        cause = f"last with {ended.cause}; free memory, or read its output"
        if self._was_silent:
            cause = f"last after runtime.worker_time_limit_s = {self._time_limit_s:g} s of silence; raise the limit"
        raise StateError(
            f"a dead process is restarted a few times, and the {self.name} died {self.num_deaths} times in a row "
            f"without progress, {cause}"
        )

    def note_progress(self) -> None:
        """Resets the count of deaths."""
        self.num_deaths = 0

    def stop(self, *, patience_s: float = 0.0) -> Ended:
        """Kills the child, if there is one and it does not end by itself in time, and returns how it ended."""
        if self._process is None:
            return Ended(status=None, cause="no process")
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s and self._process.is_alive():
            time.sleep(_STOP_POLL_S)
        ended = self._process.end(with_group=self._leads_group)
        self._process = None
        return ended
