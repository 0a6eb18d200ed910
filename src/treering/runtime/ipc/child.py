"""The child's side of the pipe to the controller: inbox, replies and shutdown.

Imports nothing heavy, so that a child reads its pipe before it imports torch.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from treering.errors import StateError, TreeringError

if TYPE_CHECKING:
    from torch import nn

    from treering.runtime.ipc.weight_store import ProcessWeights

SERVER_PARENT = "TREERING_SERVER_PARENT"
"""Environment variable: the process whose fork server dies with it."""

_PR_SET_PDEATHSIG = 1


class Port:
    """The child's end of the pipe to the controller.

    A separate thread reads the messages, so that the controller never blocks on a busy child, and a child whose
    controller has died exits at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> Any:
        """Waits for the next message and returns it."""
        return pickle.loads(self._inbox.get())

    def take_ready(self) -> list[Any]:
        """All messages that have arrived; does not wait."""
        found = []
        while not self._inbox.empty():
            found.append(pickle.loads(self._inbox.get()))
        return found

    def send(self, message: object) -> None:
        """Sends a message to the controller."""
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            os._exit(0)

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


class WeightAccess(Protocol):
    """What a launcher gives a child to reach the weights and the other processes of the run."""

    @property
    def host(self) -> str:
        """The address of this machine at which the other processes reach it; loopback, if all are on it."""

    def open(self, model: nn.Module, port: Port) -> ProcessWeights:
        """The weights, for a child that has built the model; messages about them go through its port."""


Role: TypeAlias = Callable[[Port, WeightAccess, Any], None]
"""The main function of a child: takes its port, the way to the weights and its settings, and never returns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """The first message to a child."""

    role: Role
    settings: object
    folder: str | None
    """The controller's working directory; None: the child stays where it is."""
    environment: Mapping[str, str]
    """What the child adds to its own: the controller's, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A child is ready for work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed:
    """A child has raised an error and exits."""

    error: Exception


def main(connection: Connection, access: WeightAccess, dies_with_parent: bool) -> None:
    """The entry point of a local child process.

    Args:
        connection: to the controller.
        access: to the weights.
        dies_with_parent: asks the kernel to kill this process with its parent. Must be false if the thread that started
            this process may end before the controller does.
    """
    # Ctrl-C reaches every process of a terminal; only the controller handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The controller starts this process as a daemon, so that it ends with it; but daemons may not start processes, and
    # rewards may.
    multiprocessing.current_process().daemon = False
    if dies_with_parent:
        die_with_parent()
    run_role(connection, access)


def run_role(connection: Connection, access: WeightAccess) -> None:
    """Runs the role of the first message, and sends its error if it raises; never returns.

    Ends this process when the other end of the connection closes.
    """
    _stdout_to_stderr()
    port = Port(connection)
    try:
        start: Start = port.take()
        # The fork server may have started in another folder and with another environment.
        if start.folder is not None:
            os.chdir(start.folder)
        os.environ.update(start.environment)
        start.role(port, access, start.settings)
    except Exception as error:
        port.send(Failed(error=_picklable_error(error)))
        threading.Event().wait()


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL at the parent's death: the reader thread starves while other code holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stdout_to_stderr() -> None:
    """Sends to stderr what this process writes to stdout, which holds nothing but the run's result.

    Line by line, because a process that is killed does not flush.
    """
    with suppress(OSError):
        os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _picklable_error(error: Exception) -> Exception:
    """The error with its traceback as a note, or a StateError with its text if it cannot be pickled."""
    error.add_note(f"raised in a child process:\n{''.join(traceback.format_exception(error))}")
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if type(copied) is type(error) and str(copied) == str(error):
        return error
    text = str(error) if isinstance(error, TreeringError) else f"{type(error).__name__}: {error}"
    return StateError(f"{text} (raised in a child process)")
