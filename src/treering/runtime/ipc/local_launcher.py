"""Processes on this host, forked from a server or spawned: the default launcher."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import TypeAlias

import torch
from torch import nn

from treering.errors import StateError
from treering.runtime.ipc.child import SERVER_PARENT, main
from treering.runtime.ipc.environment import environment_with
from treering.runtime.ipc.launcher import Ended, Kind, Recipe
from treering.runtime.ipc.ring_access import RingAccess
from treering.runtime.ipc.weight_ring import WeightRing
from treering.runtime.ipc.weight_store import WeightStore

MAX_ATTEMPTS = 5
"""Attempts to start one process."""

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


class LocalProcess:
    """A child process of this one, with a pipe to it."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process = process
        self.transport = connection

    @property
    def pid(self) -> int | None:
        """See `Process`."""
        return self._process.pid

    def is_alive(self) -> bool:
        """See `Process`."""
        return self._process.is_alive()

    def offer(self, version: int, slot: int | None) -> None:
        """See `Process`. Shared memory needs no offer."""

    def kill(self) -> None:
        """See `Process`."""
        self._process.kill()

    def end(self, *, with_group: bool) -> Ended:
        """See `Process`. Waits up to five seconds for its exit status."""
        if with_group and self._process.pid is not None:
            # Also after its death: what it started may live on.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_CLOSE_S)
        status = self._process.exitcode
        if status is not None:
            self._process.close()
        self.transport.close()
        return Ended(status=status, cause=describe_status(status))


class LocalLauncher:
    """Starts child processes on this host, whose weights are in shared memory.

    They are forked from a server that has imported everything, which takes a tenth of a second. The server is started
    once per process and runs only imports. With a CUDA device even imports may initialise the driver, which a forked
    process cannot use; then every child is spawned and imports for itself.
    """

    copies_environment = True
    shares_host = True

    def __init__(self) -> None:
        self._context: Context = multiprocessing.get_context("spawn")
        self._access: RingAccess | None = None

    def open(self, recipe: Recipe, model: nn.Module, num_slots: int) -> WeightStore:
        """See `Launcher`; StateError if there is too little memory."""
        ring = WeightRing(model, num_slots)
        self._access = RingAccess(memory=ring.memory, num_slots=num_slots)
        if not torch.cuda.is_available():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["__main__", *_PRELOADED, type(recipe).__module__])
            _start_server()
            self._context = context
        return ring

    def start(self, name: str, kind: Kind) -> LocalProcess:
        """See `Launcher`; StateError if the fork server dies again and again."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return self._started(name)
            except (EOFError, OSError) as error:
                # The fork server has died meanwhile; the next attempt starts another one.
                cause = error
                time.sleep(_RETRY_S)
        raise StateError(
            f"a process starts within {MAX_ATTEMPTS} attempts, and the {name} did not, last with "
            f"{type(cause).__name__}: {cause}; free memory, or allow more processes and open files"
        )

    def close(self) -> None:
        """See `Launcher`."""
        self._access = None

    def _started(self, name: str) -> LocalProcess:
        assert self._access is not None, "a launcher is opened before it starts processes"
        ours, theirs = self._context.Pipe()
        # The kernel watches the thread that started the process: the server's, or this one, which may end early.
        is_forked = isinstance(self._context, ForkServerContext)
        dies_with_parent = is_forked or threading.current_thread() is threading.main_thread()
        process = self._context.Process(
            target=main, args=(theirs, self._access, dies_with_parent), name=f"treering {name}", daemon=True
        )
        with theirs:
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
        return LocalProcess(process, ours)


def describe_status(status: int | None) -> str:
    """An exit status in words: "signal SIGKILL", "exit status 1"."""
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _start_server() -> None:
    """Starts the fork server if there is none, with this process's module search path."""
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if threading.current_thread() is threading.main_thread():
        # The kernel watches the thread that starts the server, and another one may end before the run.
        changes[SERVER_PARENT] = str(os.getpid())
    with environment_with(changes):
        forkserver.ensure_running()
