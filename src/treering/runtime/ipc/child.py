"""The child's side of the pipe to the controller: inbox, replies and shutdown.

Imports nothing heavy, so that a child reads its pipe before it imports torch.
"""

import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from treering.errors import StateError, TreeringError
from treering.runtime.ipc.shared_memory import SharedMemory

_PR_SET_PDEATHSIG = 1


class Port:
    """What a child talks through.

    Messages are read by a thread of their own, so that the controller never waits for a child that is busy, and a
    child whose controller is gone ends at once, whatever it does.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> Any:
        """The next message; waits for it."""
        return pickle.loads(self._inbox.get())

    def take_ready(self) -> list[Any]:
        """The messages that have come, none if there is none."""
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


Role: TypeAlias = Callable[[Port, SharedMemory, Any], None]
"""What a child does, given its port, the weights' memory and its settings; it never returns of itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """The first message to a child."""

    role: Role
    settings: object
    folder: str
    """The controller's current one."""
    environment: Mapping[str, str]
    """The controller's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A child has built what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed:
    """A child ends with an error."""

    error: Exception


def main(connection: Connection, memory: SharedMemory, dies_with_parent: bool) -> None:
    """The target of a new process: takes its role from the first message, and sends an error that ends it.

    Args:
        connection: to the controller.
        memory: of the weights.
        dies_with_parent: asks the system for that where it can promise it; not where the thread that has started this
            process may end before the controller does.
    """
    # Ctrl-C reaches every process of a terminal; the controller alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A daemon for the controller, whose exit ends it; but rewards may well start processes, which daemons cannot.
    multiprocessing.current_process().daemon = False
    if dies_with_parent:
        _die_with_parent()
    port = Port(connection)
    try:
        start: Start = port.take()
        # The server that forked this process began in whatever folder and environment there was then.
        os.chdir(start.folder)
        os.environ.update(start.environment)
        start.role(port, memory, start.settings)
    except Exception as error:
        port.send(Failed(error=_portable(error)))
        # What is printed here may sit in a buffer; the reader ends this process without another word.
        sys.stdout.flush()
        threading.Event().wait()


def _die_with_parent() -> None:
    """Asks the kernel for SIGKILL at the parent's death: code that holds the interpreter's lock starves the reader."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _portable(error: Exception) -> Exception:
    """The error with where it came from as a note, or its text as another one where it cannot be sent."""
    error.add_note(f"raised in a child process:\n{''.join(traceback.format_exception(error))}")
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if type(copied) is type(error) and str(copied) == str(error):
        return error
    text = str(error) if isinstance(error, TreeringError) else f"{type(error).__name__}: {error}"
    return StateError(f"{text} (raised in a child process)")
