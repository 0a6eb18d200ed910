"""The stderr of a command that takes long: in a log, no half minute passes without a line."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from treering.cli.display.panel import in_words

PART_EVERY_S = 30.0
"""When stderr is not a terminal, what runs prints a line after this many seconds without one."""

_LOOK_EVERY_S = 1.0


class LogConsole(Console):
    """A console that, off a terminal, says what is being done once nothing else has been said for a while.

    Example: `with console.telling("loading the model"): build_model()` prints "loading the model, 30 s" after half a
    minute, and "loading the model, 1 min 0 s" after another.
    """

    def __init__(self, **options: Any) -> None:
        """Writes to stderr; `options` are rich's."""
        super().__init__(stderr=True, highlight=False, **options)
        self._printed_s = time.monotonic()
        self._doing, self._since_s = "", self._printed_s

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as rich does."""
        self._printed_s = time.monotonic()
        super().print(*objects, **options)

    def note(self, doing: str) -> None:
        """Notes what is being done from now on."""
        self._doing, self._since_s = doing, time.monotonic()

    @contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """Tells of the block what was noted last, at first `doing`, at least every `PART_EVERY_S`."""
        self.note(doing)
        if self.is_terminal:
            yield
            return
        has_ended = threading.Event()
        thread = threading.Thread(target=self._tell, args=(has_ended,), name="treering-log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def _tell(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now >= self._printed_s + PART_EVERY_S:
                self.print(f"{self._doing}, {in_words(now - self._since_s)}", soft_wrap=True)


def note_doing(console: Console, doing: str) -> None:
    """Notes what is being done, for a console that tells."""
    if isinstance(console, LogConsole):
        console.note(doing)
