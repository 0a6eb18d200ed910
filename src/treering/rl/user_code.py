"""Runs a task's rewards and observations so that they cannot end the run, fork it, or move it to another folder."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from treering.errors import InputError, Interrupted


@contextmanager
def contained() -> Iterator[None]:
    """Runs a block of user code.

    An exception that would end the program, such as `SystemExit` or a `KeyboardInterrupt` that the code itself raises,
    becomes an InputError; Ctrl-C stays one, even if the code swallows it. A forked copy of the process ends at the end
    of the block, and the working directory is what it was.

    Raises:
        InputError: the code raised an exception that is not an `Exception`.
        KeyboardInterrupt, Interrupted: the user or the system interrupts the run.

    Example: `with contained(): sys.exit()` raises InputError, and Ctrl-C during `with contained(): time.sleep(9)`
    raises KeyboardInterrupt.
    """
    process, folder = os.getpid(), _folder()
    try:
        with _noted_interrupts() as interrupts:
            try:
                yield
            except Interrupted:
                raise
            except BaseException as error:
                if isinstance(error, Exception) and not interrupts:
                    raise
                if not interrupts:
                    name = type(error).__name__
                    raise InputError(f"a task may not end the run, and it raised {name}: {error}; catch it") from error
        if interrupts:
            raise KeyboardInterrupt
    finally:
        if os.getpid() != process:
            # A fork returned from the block twice; only the original continues the run.
            os._exit(0)
        _return_to(folder)


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yields a list that gets an entry for each Ctrl-C in the block, if Python's own handler would raise for it."""
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def note(signal_number: int, _: FrameType | None) -> None:
        seen.append(signal_number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _folder() -> str | None:
    """The working directory; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _return_to(folder: str | None) -> None:
    if folder is not None and _folder() != folder:
        with suppress(OSError):
            os.chdir(folder)
