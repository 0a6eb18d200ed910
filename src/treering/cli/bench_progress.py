"""How a benchmark shows that it is alive: a live line on a terminal, a few plain lines elsewhere.

Knows words, the share that is done and a clock; knows nothing of what is measured.
"""

import sys
import time

from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from treering.cli.live import LiveLine

LINE_EVERY_S = 120.0
"""Where stderr is no terminal, a line at most this often."""


class BenchProgress(LiveLine):
    """Shows on stderr what is being measured and, where the share that is done is known, how long the rest may take.

    Example: `with BenchProgress(console) as progress: progress.tell("math: tree done", 0.25)`, a minute after the
    start, shows `math: tree done, 25 %, about 3 min left`.
    """

    def __init__(self, console: Console) -> None:
        """`console` writes to stderr."""
        self._is_live = sys.stderr.isatty()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        super().__init__(console, *columns, is_live=self._is_live)
        self._job = self._live.add_task("preparing", total=None)
        self._first: tuple[float, float] | None = None
        self._last_line = time.monotonic()

    def tell(self, words: str, done: float | None = None) -> None:
        """Shows the words; `done` is the share of the whole between 0 and 1, None where it is unknown."""
        now = time.monotonic()
        text = words if done is None else f"{words}, {done:.0%}{self._left(done, now)}"
        self._live.update(self._job, description=text)
        if not self._is_live and done is not None and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._console.print(text, soft_wrap=True)

    def _left(self, done: float, now: float) -> str:
        # What came before the share was first known does not count towards its speed.
        first_done, since = self._first = self._first or (done, now)
        if done <= first_done:
            return ""
        seconds = (now - since) / (done - first_done) * (1.0 - done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 60 else ", less than a minute left"
