"""The controller's side of a child process: start it, exchange messages, and replace it when it dies."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, TypeAlias

import torch

from treering.errors import StateError
from treering.runtime.ipc.child import SERVER_PARENT, Failed, Ready, Role, Start, main
from treering.runtime.ipc.shared_memory import SharedMemory

MAX_DEATHS = 5
"""Deaths in a row, without progress in between, that end the run."""

_CLOSE_S = 5.0
_RETRY_S = 0.1
_PRELOADED = (
    "treering.runtime.ipc.fork_server",
    "treering.engine.torch_engine",
    "treering.runtime.workers.reward_worker",
    "treering.runtime.workers.trainer_worker",
    "treering.runtime.workers.rollout_worker",
    "transformers.modeling_utils",
)


Context: TypeAlias = ForkServerContext | SpawnContext


def start_method(recipe: object) -> Context:
    """How children start: forked from a server that has imported everything, which takes a tenth of a second.

    The server is started once per process and runs only imports. With a CUDA device even imports may initialise the
    driver, which a forked process cannot use; then every child is spawned and imports for itself.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *_PRELOADED, type(recipe).__module__])
    _start_server()
    return context


def _start_server() -> None:
    """Starts the fork server if there is none, with this process's module search path."""
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if threading.current_thread() is threading.main_thread():
        # The kernel watches the thread that starts the server, and another one may end before the run.
        changes[SERVER_PARENT] = str(os.getpid())
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class ChildProcess:
    """A named child process that can be restarted.

    Example: a child killed by SIGKILL yields its sent messages, then `has_died`; `start` starts the next one.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        memory: SharedMemory,
        context: Context,
        *,
        time_limit_s: float,
        leads_group: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: used in errors.
            role: what it runs.
            memory: of the weights.
            context: from `start_method`.
            time_limit_s: how long it may be silent while it has work; see `end_if_silent`.
            leads_group: the role makes itself the leader of a process group, which `stop` kills as a whole.
        """
        self.name = name
        self._leads_group = leads_group
        self._time_limit_s = time_limit_s
        self._heard_s = time.monotonic()
        self._was_silent = False
        self._context = context
        self._role = role
        self._memory = memory
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self.num_deaths = 0
        """Deaths in a row, without progress in between."""
        self.is_ready = False

    @property
    def connection(self) -> Connection:
        """The connection to wait for; only while a child runs."""
        assert self._connection is not None
        return self._connection

    @property
    def pid(self) -> int | None:
        """The child's process id; None if there is no child."""
        return None if self._process is None else self._process.pid

    def start(self, settings: object) -> None:
        """Starts the child with the settings of its role.

        Raises:
            StateError: the fork server dies again and again.
        """
        for _ in range(MAX_DEATHS):
            try:
                self._process, self._connection = self._started()
                break
            except (EOFError, OSError) as error:
                # The fork server has died meanwhile; the next attempt starts another one.
                cause = error
                time.sleep(_RETRY_S)
        else:
            raise StateError(
                f"a process starts within {MAX_DEATHS} attempts, and the {self.name} did not, last with "
                f"{type(cause).__name__}: {cause}; free memory, or allow more processes and open files"
            )
        self.is_ready = self._was_silent = False
        self._heard_s = time.monotonic()
        self.send(Start(role=self._role, settings=settings, folder=os.getcwd(), environment=dict(os.environ)))

    def _started(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        # The kernel watches the thread that started the process: the server's, or this one, which may end early.
        is_forked = isinstance(self._context, ForkServerContext)
        dies_with_parent = is_forked or threading.current_thread() is threading.main_thread()
        process = self._context.Process(
            target=main, args=(theirs, self._memory, dies_with_parent), name=f"treering {self.name}", daemon=True
        )
        with theirs:
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
        return process, ours

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

    def reap(self) -> int | None:
        """Cleans up a dead child and returns its exit status.

        Raises:
            StateError: it is the `MAX_DEATHS`-th in a row.
        """
        status = self.stop()
        self.num_deaths += 1
        if self.num_deaths < MAX_DEATHS:
            return status
        cause = f"last with {describe_status(status)}; free memory, or read its output"
        if self._was_silent:
            cause = f"last after runtime.worker_time_limit_s = {self._time_limit_s:g} s of silence; raise the limit"
        raise StateError(
            f"a dead process is restarted a few times, and the {self.name} died {self.num_deaths} times in a row "
            f"without progress, {cause}"
        )

    def note_progress(self) -> None:
        """Resets the count of deaths."""
        self.num_deaths = 0

    def stop(self) -> int | None:
        """Kills the child, if there is one, and returns its exit status."""
        if self._process is None:
            return None
        if self._leads_group and self._process.pid is not None:
            # Also after its death: what it started may live on.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_CLOSE_S)
        status = self._process.exitcode
        if status is not None:
            self._process.close()
        self.connection.close()
        self._process = self._connection = None
        return status


def describe_status(status: int | None) -> str:
    """An exit status in words: "signal SIGKILL", "exit status 1"."""
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
