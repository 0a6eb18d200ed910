"""Progress on stderr: of steps, and of other work."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from treering.cli.display.log_console import PART_EVERY_S, note_doing
from treering.compiling.cached import is_compiled

NUM_PLAIN_LINES = 10
"""Most step lines per run when stderr is not a terminal."""

LINE_EVERY_S = 120.0
"""When stderr is not a terminal, `WorkProgress` prints at most one line per this many seconds."""


def note_compiling(console: Console, *functions: Any) -> None:
    """Prints one line if numba will compile any of the functions, as it does once after installation.

    Args:
        console: writes to stderr.
        functions: of `compiled_once`. Each stands for those that its command compiles with it.
    """
    if not all(map(is_compiled, functions)):
        names = ", ".join(function.__name__ for function in functions if not is_compiled(function))
        line = f"compiling functions with numba, once after installation: {names}; this takes some seconds"
        console.print(line, soft_wrap=True)


@contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Prints the warnings of the block as they come, each as a line without the code that raised it.

    Example: a history on a full disk prints "warning: history could not be written to ...".
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.print(
            f"warning: {message}", soft_wrap=True, markup=False
        )
        yield


class StepLines:
    """The steps of a run in a log: a line for each tenth of them, and more often where they take long.

    Example: `StepLines(num_steps=60, first_step=0, console=console, title="step").show(6, "loss 0.5")` prints `step
    6/60 loss 0.5`.
    """

    def __init__(self, *, num_steps: int, first_step: int, console: Console, title: str) -> None:
        """`first_step` of `num_steps` steps are already done; `title` precedes the count."""
        self._num_steps, self._num_done = num_steps, first_step
        self._title, self._console = title, console
        self._last_line = time.monotonic()
        self._every = max(1, -(-(num_steps - first_step) // NUM_PLAIN_LINES))
        self._note()

    def show(self, step: int, text: str) -> None:
        """Shows that `step` is done, with the caller's text."""
        self._num_done = step
        self._note()
        if step % self._every == 0 or step == self._num_steps:
            self._print(f"{self._title} {step}/{self._num_steps} {text}")

    def show_part(self, text: str) -> None:
        """Shows how far the next step is, if no line has come for `PART_EVERY_S`."""
        if time.monotonic() - self._last_line >= PART_EVERY_S:
            self._print(f"{self._title} {self._num_done + 1}/{self._num_steps}: {text}")

    def print_now(self, step: int, text: str) -> None:
        """Prints a line about a step, however many there are."""
        self._print(f"{self._title} {step}/{self._num_steps}: {text}")

    def _note(self) -> None:
        note_doing(self._console, f"{self._title} {self._num_done + 1}/{self._num_steps}")

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(line, soft_wrap=True)


class WorkProgress:
    """What is being computed, and how long the rest may take if the finished share is known; use it in `with`.

    It is a line that is redrawn and then erased on a terminal, and a few plain lines elsewhere.

    Example: `with WorkProgress(console) as progress: progress.show("math: tree done", 0.25)`, a minute after the
    start, shows `math: tree done, 25 %, about 3 min left`.
    """

    def __init__(self, console: Console) -> None:
        """`console` writes to stderr."""
        self.console, self._is_live = console, sys.stderr.isatty()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True, disable=not self._is_live)
        self._job = self._live.add_task("preparing", total=None)
        self._first: tuple[float, float] | None = None
        self._reading: tuple[str, int, float] | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A display that never began is left alone: earlier versions of rich end it with an empty line.
        if self._is_live:
            self._live.stop()

    def show(self, words: str, done: float | None = None) -> None:
        """Shows the words; `done` is the finished share between 0 and 1, None if unknown."""
        now = time.monotonic()
        text = words if done is None else f"{words}, {done:.0%}{self._left(done, now)}"
        self._live.update(self._job, description=text)
        if not self._is_live and done is not None and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self.console.print(text, soft_wrap=True)

    def counting(self, words: str, total: int) -> Callable[[int], None]:
        """A function that counts further parts of `total` as done, and shows the words with the share.

        Example: after `count = progress.counting("drafting", 400)` and `count(100)` it shows `drafting, 25 %`.
        """
        self._first, num_done = None, 0

        def count(number: int) -> None:
            nonlocal num_done
            num_done += number
            self.show(words, num_done / max(total, 1))

        self.show(words)
        return count

    def show_reading(self, name: str, num_records: int, num_read: int, num_bytes: int) -> None:
        """Shows how much of a file has been read and tokenized, and how fast; `show` adds the time left."""
        now = time.monotonic()
        if self._reading is None or self._reading[0] != name:
            self._reading, self._first = (name, num_read, now), None
        _, first_read, since = self._reading
        speed = (num_read - first_read) / 1e6 / max(now - since, 1e-6)
        words = f"{name}: {num_records:,} records read and tokenized, {num_read / 1e6:,.0f} MB, {speed:.1f} MB/s"
        self.show(words, min(num_read / max(num_bytes, 1), 1.0))

    def _left(self, done: float, now: float) -> str:
        # The speed is measured from the first known share on.
        first_done, since = self._first = self._first or (done, now)
        if done <= first_done:
            return ""
        seconds = (now - since) / (done - first_done) * (1.0 - done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 60 else ", less than a minute left"
