"""How a signal ends a command: with one line, the exit code of the signal, and no process left behind.

The main thread raises `Interrupted` as soon as it runs Python code, so that `with` statements stop processes and close
files. A second thread watches that it does. Ending at any moment is safe: what is half written is ignored or cut off by
the next start, as after a kill. A run that has something to save defers the end until it has.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Protocol

from treering.errors import Interrupted

GRACE_S = 5.0
"""Seconds that a command has to end by itself after a signal; then its process ends at once."""

_SAME_S = 0.5
"""Signals this soon after the first are the same request, which several processes have passed on."""

_POLL_S = 0.5
"""How often the second thread looks whether the end is still deferred."""

_AGAIN_S = 0.01
"""A signal that cannot be raised yet is sent again so much later."""

_LATE = 0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Request(Protocol):
    """Asks a run for its end; an `Interruption` of the training loops."""

    @property
    def is_requested(self) -> bool:
        """Whether the run has been asked."""

    def request(self, signal_number: int) -> bool:
        """Asks the run, which may have been asked before; returns whether to wait for it."""


class _Handler:
    """What a signal does in the main thread: it raises, unless that is deferred."""

    def __init__(self) -> None:
        self.deferred: Request | None = None
        self.announce: Callable[[str], object] = print

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.defers(number):
            return
        if _is_called_back(frame):
            _send_again(number)
            return
        raise Interrupted(number)

    def defers(self, number: int) -> bool:
        """Asks whoever has deferred signals, if anyone has; returns whether to wait."""
        deferred = self.deferred
        return deferred is not None and deferred.request(number)

    @property
    def is_waiting(self) -> bool:
        """Whether a signal has come, and the end is deferred."""
        deferred = self.deferred
        return deferred is not None and deferred.is_requested


@contextmanager
def deferred_to(request: Request, announce: Callable[[str], object]) -> Iterator[None]:
    """Leaves the first signal in the block to a run, which saves before it raises `Interrupted`; a second ends at once.

    Outside `ended_by_signals` the block runs as it is.

    Args:
        request: asked at each signal; where it need not wait, `Interrupted` is raised as without this block.
        announce: prints what happens next, at once; called in another thread.

    Example: at SIGTERM it announces "interrupted by SIGTERM: saving the last whole step (again: end at once)".
    """
    installed = [signal.getsignal(number) for number in _SIGNALS]
    handler = next((each for each in installed if isinstance(each, _Handler)), _Handler())
    handler.announce, handler.deferred = announce, request
    try:
        yield
    finally:
        handler.deferred = None


@contextmanager
def ended_by_signals(speaks: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raises `Interrupted` in the block at SIGINT, SIGTERM or SIGHUP, unless the process started with it ignored.

    The process ends at once at a second signal, or if the block has not ended `GRACE_S` after the first, or after the
    end of `deferred_to`; `speaks` says whether it then prints a line. Outside the main thread the block runs as it is.

    Raises:
        Interrupted: the first signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # `nohup` and shells that start background jobs ignore some.
    handled = [number for number in _SIGNALS if handlers[number] not in (signal.SIG_IGN, None)]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    usual, handler = sys.unraisablehook, _Handler()

    def restore() -> None:
        sys.unraisablehook = usual
        signal.set_wakeup_fd(-1)
        for number in handled:
            # Handlers of the block's own code stay.
            if signal.getsignal(number) is handler:
                signal.signal(number, handlers[number])

    sys.unraisablehook = partial(_take_unraisable, usual)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, handler)
    _leave_out_forks(handled, restore)
    watching = (reader, handled, handler, speaks)
    threading.Thread(target=_watch, args=watching, name="treering-signals", daemon=True).start()
    try:
        yield
    except Exception as error:
        interruption = _interruption_in(error)
        if interruption is None:
            raise
        raise interruption from None
    finally:
        restore()
        os.close(writer)


def _leave_out_forks(handled: Sequence[int], restore: Callable[[], None]) -> None:
    """Gives processes that user code forks their usual handlers: else their signals would be written into our pipe.

    Signals are blocked meanwhile, so that none finds the handlers of the parent in the child.
    """
    forking = threading.local()

    def before() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def in_child() -> None:
        restore()
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


@contextmanager
def advising(advice: str | Callable[[], str]) -> Iterator[None]:
    """Adds to an `Interrupted` that passes what the user can do next; a function says it at that moment."""
    try:
        yield
    except BaseException as error:
        interruption = _interruption_in(error)
        if interruption is not None:
            interruption.add_note(advice if isinstance(advice, str) else advice())
        raise


def exit_code(signal_number: int) -> int:
    """The exit code of a command that a signal has ended.

    Example: 130 for SIGINT, 143 for SIGTERM.
    """
    return 128 + signal_number


def describe(error: Interrupted) -> str:
    """One line for the user.

    Example: "interrupted by SIGTERM; the same command resumes the run in runs/try".
    """
    advice = getattr(error, "__notes__", ["start the same command again"])
    return "; ".join([f"interrupted by {signal.Signals(error.signal_number).name}", *advice])


def leave_at_once(code: int) -> NoReturn:
    """Exits without tearing down the interpreter, which takes more than a second once torch is loaded."""
    for stream in (sys.stdout, sys.stderr):
        # A closed stream is None; what a full disk or a closed pipe does not take is lost either way.
        with suppress(AttributeError, OSError):
            stream.flush()
    os._exit(code)


def leave(code: int, known: Sequence[threading.Thread]) -> NoReturn:
    """Exits, `GRACE_S` later at most if user code has left threads that never end; `known` threads are ignored."""
    deadline = time.monotonic() + GRACE_S
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread not in known]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in left):
        leave_at_once(code)
    sys.exit(code)


def _send_again(number: int) -> None:
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def _take_unraisable(usual: Callable[[Any], object], lost: Any) -> None:
    """Takes what was raised where Python lets no error out, as in a finaliser; an interruption must not end there."""
    if isinstance(lost.exc_value, Interrupted):
        _send_again(lost.exc_value.signal_number)
        return
    usual(lost)


def _is_called_back(frame: FrameType | None) -> bool:
    """Whether LLVM waits for Python, which asks numba for the code it has on disk: no error passes through it.

    It would be printed and dropped, and LLVM would read the answer that is missing (SIGSEGV).
    """
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("llvmlite."):
        frame = frame.f_back
    return frame is not None


def _interruption_in(error: BaseException) -> Interrupted | None:
    """The `Interrupted` that an error is or was caused by: pydantic wraps whatever its callbacks raise."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Interrupted):
        cause = cause.__cause__
    return cause


def _watch(reader: int, handled: Sequence[int], handler: _Handler, speaks: Callable[[], bool]) -> None:
    """Ends the process if the block does not end in time after a signal."""
    first = _next_signal(reader, handled, None)
    began_s = time.monotonic()
    # The main thread may be in a long computation, and its handler comes later.
    if first is not None and handler.defers(first):
        name = signal.Signals(first).name
        handler.announce(f"interrupted by {name}: saving the last whole step (again: end at once)")
    following = _next_signal(reader, handled, began_s + _SAME_S)
    while following and time.monotonic() < began_s + _SAME_S:
        following = _next_signal(reader, handled, began_s + _SAME_S)
    until_s = began_s + GRACE_S
    while following == _LATE and time.monotonic() < until_s:
        following = _next_signal(reader, handled, min(until_s, time.monotonic() + _POLL_S))
        until_s = time.monotonic() + GRACE_S if handler.is_waiting else until_s
    os.close(reader)
    if first is None or following is None:
        return
    if speaks():
        print(f"treering: {describe(Interrupted(first))}", file=sys.stderr, flush=True)
    os._exit(exit_code(first))


def _next_signal(reader: int, handled: Sequence[int], until_s: float | None) -> int | None:
    """The number of the next signal, `_LATE` if there is none until then, or None once the block has ended."""
    while True:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        if not select.select([reader], [], [], left_s)[0]:
            return _LATE
        number = os.read(reader, 1)
        if not number:
            return None
        if number[0] in handled:
            return number[0]
