"""Threads for what blocks: one that hangs never keeps the program from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


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
