"""End a command on Ctrl-C, SIGTERM and SIGHUP: the first signal in order, a second one at once.

The first raises `Interrupted` in the main thread, so that `with` statements stop processes and close files; a run with
something to save continues until its step is done or dropped, and saves. The command then prints one line and exits
with the signal's code. Ending at any moment is safe: the next start ignores or cuts off half-written data, as after a
kill.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from treering.errors import Interrupted

THREADS_S = 5.0
"""Seconds that a finished command waits for threads left by user code."""

_SAME_S = 0.5
"""Signals this soon after the first are the same request, passed on by several processes."""

_AGAIN_S = 0.01
"""Seconds after which a signal that cannot be raised yet is sent again."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Handler:
    def __init__(self, speaks: Callable[[], bool]) -> None:
        self.request: Callable[[int], bool] = lambda number: False
        self.announce: Callable[[str], object] = print
        self._speaks = speaks
        self._first: tuple[int, float] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first is not None:
            first, since_s = self._first
            if time.monotonic() >= since_s + _SAME_S:
                if self._speaks():
                    # Do not use `print`: the signal may have interrupted one in the middle of a line.
                    os.write(2, f"treering: {describe(Interrupted(first))}\n".encode())
                os._exit(128 + first)
            return
        if _is_called_back(frame):
            _send_again(number)
            return
        self._first = number, time.monotonic()
        if not self.request(number):
            raise Interrupted(number)
        line = f"interrupted by {signal.Signals(number).name}: saving the last whole step (again: end at once)"
        # Print in a thread: the signal may have interrupted the console in the middle of a line.
        threading.Thread(target=self.announce, args=(line,), name="treering-signals", daemon=True).start()

    def take_unraisable(self, usual: Callable[[Any], object], lost: Any) -> None:
        """Resend a signal that was raised where Python drops errors, as in a finaliser."""
        if isinstance(lost.exc_value, Interrupted):
            self._first = None
            _send_again(lost.exc_value.signal_number)
            return
        usual(lost)


@contextmanager
def deferred_to(request: Callable[[int], bool], announce: Callable[[str], object]) -> Iterator[None]:
    """Let a run save at the first signal of the block before it raises `Interrupted`; a second signal ends at once.

    Outside `ended_by_signals` signals are unchanged.

    Args:
        request: asks the run to end, and returns whether to wait for it; else `Interrupted` is raised at once.
        announce: prints what happens next, at once; called in another thread.

    Example: at SIGTERM it announces "interrupted by SIGTERM: saving the last whole step (again: end at once)".
    """
    installed = [signal.getsignal(number) for number in _SIGNALS]
    handler = next((each for each in installed if isinstance(each, _Handler)), _Handler(lambda: True))
    handler.announce, handler.request = announce, request
    try:
        yield
    finally:
        handler.request = lambda number: False


@contextmanager
def ended_by_signals(speaks: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raise `Interrupted` in the block at SIGINT, SIGTERM or SIGHUP, unless the process started with it ignored.

    A second signal ends the process at once; `speaks` decides whether it then prints a line. Outside the main thread
    signals are unchanged.

    Raises:
        Interrupted: the first signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual, handler = sys.unraisablehook, _Handler(speaks)
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        sys.unraisablehook = usual
        for number in _SIGNALS:
            # Keep handlers that the block's own code installed.
            if signal.getsignal(number) is handler:
                signal.signal(number, before[number])

    sys.unraisablehook = partial(handler.take_unraisable, usual)
    for number in _SIGNALS:
        # `nohup` and shells that start background jobs have some ignored.
        if before[number] not in (signal.SIG_IGN, None):
            signal.signal(number, handler)
    _leave_out_forks(restore)
    try:
        yield
    except Exception as error:
        interruption = _interruption_in(error)
        if interruption is None:
            raise
        raise interruption from None
    finally:
        restore()


def _leave_out_forks(restore: Callable[[], None]) -> None:
    """Restore the usual handlers in processes that user code forks.

    Signals are blocked meanwhile, because Python drops a signal that finds the parent's handlers in the child.
    """
    forking = threading.local()

    def before() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def in_parent() -> None:
        # A thread may have blocked them itself.
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def in_child() -> None:
        restore()
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


@contextmanager
def advising(advice: str | Callable[[], str]) -> Iterator[None]:
    """Add to a passing `Interrupted` what the user can do next; a function is called at that moment."""
    try:
        yield
    except BaseException as error:
        interruption = _interruption_in(error)
        if interruption is not None:
            interruption.add_note(advice if isinstance(advice, str) else advice())
        raise


def describe(error: Interrupted) -> str:
    """Describe the end in one line for the user.

    Example: "interrupted by SIGTERM; the same command resumes the run in runs/try".
    """
    advice = getattr(error, "__notes__", ["start the same command again"])
    return "; ".join([f"interrupted by {signal.Signals(error.signal_number).name}", *advice])


def leave_at_once(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which takes more than a second once torch is loaded."""
    for stream in (sys.stdout, sys.stderr):
        # A closed stream is None; text that a full disk or a closed pipe rejects is lost either way.
        with suppress(AttributeError, OSError):
            stream.flush()
    os._exit(code)


def leave(code: int, known: Sequence[threading.Thread]) -> NoReturn:
    """Exit, at most `THREADS_S` later if user code has left running threads; `known` threads are ignored."""
    deadline = time.monotonic() + THREADS_S
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread not in known]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in left):
        leave_at_once(code)
    sys.exit(code)


def _send_again(number: int) -> None:
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def _is_called_back(frame: FrameType | None) -> bool:
    """Return whether LLVM is waiting for Python to read numba's cached code, where no error can pass.

    The error would be printed and dropped, and LLVM would read the missing answer (SIGSEGV).
    """
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("llvmlite."):
        frame = frame.f_back
    return frame is not None


def _interruption_in(error: BaseException) -> Interrupted | None:
    """Return the `Interrupted` that an error is or was caused by: pydantic wraps whatever its callbacks raise."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Interrupted):
        cause = cause.__cause__
    return cause
