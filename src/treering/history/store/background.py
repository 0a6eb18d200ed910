"""Runs one piece of work at a time in a thread and keeps its error for the caller."""

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time, here or in a thread.

    Example: `start(f)`, then `wait()`, does what `f()` does, errors included; so does `run(f)`, then `wait()`.
    """

    def __init__(self) -> None:
        """Nothing runs."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Starts the work in a thread; earlier work must have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(target=self.run, args=(work,), name="treering-publish")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the work is done, and raises its error, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def run(self, work: Callable[[], None]) -> None:
        """Does the work in the caller's thread; its error is kept for `wait`."""
        try:
            work()
        except BaseException as error:
            self._error = error
