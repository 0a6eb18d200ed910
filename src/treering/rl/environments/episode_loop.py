"""An event loop in a thread of its own, which says when all that could run in it has run."""

import asyncio
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

from treering.closing import Closing


class DaemonThreads(ThreadPoolExecutor):
    """An executor that runs each call in a daemon thread of its own.

    Example:
        >>> DaemonThreads().submit(pow, 2, 5).result()
        32
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See `Executor.submit`."""
        found: Future[Any] = Future()

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(fn(*args, **kwargs))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, name="treering-tool", daemon=True).start()
        return found


_PATIENCE_S = 1.0
"""How long ending waits for coroutines that are cancelled."""


class _Selector(selectors.DefaultSelector):
    """Tells when its loop is about to wait, with nothing left to run, and when it goes on."""

    def __init__(self, on_idle: Callable[[], None], on_busy: Callable[[], None]) -> None:
        super().__init__()
        self._on_idle, self._on_busy = on_idle, on_busy

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._on_idle()
        try:
            return super().select(timeout)
        finally:
            self._on_busy()


class EpisodeLoop(Closing):
    """An event loop in a daemon thread: what blocks it can be seen and left from outside.

    `SystemExit` in a task stays in the task.

    Example:
        >>> async def double(number):
        ...     return 2 * number
        >>> with EpisodeLoop() as loop:
        ...     loop.start(double(4)).result()
        8
    """

    def __init__(self) -> None:
        """Starts the thread."""
        self._state = threading.Condition()
        self._is_marked = self._is_idle = self._is_closing = False
        self._busy_since: float | None = time.monotonic()
        self._num_pauses = 0
        self._loop = asyncio.SelectorEventLoop(_Selector(self._note_idle, self._note_busy))
        self._loop.set_exception_handler(_ignore)
        self._loop.set_default_executor(DaemonThreads())
        self._thread = threading.Thread(target=self._serve, name="treering-episodes", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Runs a coroutine in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def settle(self) -> None:
        """Returns once the loop has nothing to run but what waits for a time, a file or another thread.

        What other threads have handed to the loop before is among what has run. Returns at once while the loop ends.
        """
        with self._state:
            if self._is_closing:
                return
            self._is_marked = False
            self._is_idle = False
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._mark)
        with self._state:
            self._state.wait_for(lambda: self._is_idle or self._is_closing)

    def num_pauses(self) -> int:
        """How often the loop has had nothing to run so far."""
        return self._num_pauses

    def busy_s(self) -> float:
        """Seconds for which the loop has been running without a pause; 0.0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def frame(self) -> FrameType | None:
        """What the loop's thread runs now."""
        return sys._current_frames().get(self._thread.ident or -1)

    def close(self) -> None:
        """Cancels all tasks and ends the thread; one that blocks is left to run."""
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * _PATIENCE_S)

    def _mark(self) -> None:
        with self._state:
            self._is_marked = True

    def _note_idle(self) -> None:
        self._busy_since = None
        self._num_pauses += 1
        with self._state:
            if self._is_marked:
                self._is_idle = True
                self._state.notify_all()

    def _note_busy(self) -> None:
        self._busy_since = time.monotonic()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closing:
            # A task that raises SystemExit has it as its result, and asyncio ends the loop besides.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE_S))
        self._loop.close()


def _ignore(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Errors that nobody awaits belong to episodes that have ended."""
