"""How a training run shows itself while it runs: a live line on a terminal, a few plain lines elsewhere.

Knows step reports and where stderr goes. Decides nothing; a run is the same without it.
"""

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from treering.cli.live import LiveLine

if TYPE_CHECKING:
    # It imports torch, which `treering simulate` does without.
    from treering.train.loop.step_report import StepReport

NUM_PLAIN_LINES = 10
"""Most step lines where stderr is no terminal: enough to follow a log file, few enough to read it."""

LINE_EVERY_S = 120.0
"""Where stderr is no terminal, `WorkProgress` prints a line at most this often."""


class StepProgress(LiveLine):
    """Shows steps of a run on stderr; use it in a `with` statement.

    Example: `with StepProgress(num_steps=60, first_step=0, console=console) as progress: progress.show(report)` prints
    `step 6/60 loss 4.211 tokens/s 7,910 flat 5,830 unique sharing 0.26` for each tenth of a run into a log.
    """

    def __init__(self, *, num_steps: int, first_step: int, console: Console, title: str = "step") -> None:
        """`first_step` steps of `num_steps` are done already; `title` stands before the count."""
        self._num_steps = num_steps
        self._title = title
        self._every = max(1, -(-(num_steps - first_step) // NUM_PLAIN_LINES))
        self._started = time.perf_counter()
        self._num_flat = self._num_unique = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        super().__init__(console, *columns, is_live=console.is_terminal)
        self._job = self._live.add_task(title, total=num_steps, completed=first_step, text="")

    def show(self, report: "StepReport") -> None:
        """Shows one more step; rates are averages since the start of this process's training."""
        self._num_flat += report.update.num_branch_tokens
        self._num_unique += report.update.num_tokens
        self.tell(report.step, self._text(report))

    def tell(self, step: int, text: str) -> None:
        """Shows that `step` is done, in the caller's own words."""
        self._live.update(self._job, completed=step, text=text)
        if not self._console.is_terminal and self._is_due(step):
            self._console.print(f"{self._title} {step}/{self._num_steps} {text}", soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or step == self._num_steps

    def _text(self, report: "StepReport") -> str:
        seconds = time.perf_counter() - self._started
        sharing = 1.0 - self._num_unique / self._num_flat
        rates = f"{self._num_flat / seconds:,.0f} flat {self._num_unique / seconds:,.0f} unique"
        return f"loss {report.update.loss:.3f} tokens/s {rates} sharing {sharing:.2f}"


class WorkProgress(LiveLine):
    """Shows on stderr what is being computed and, where the share that is done is known, how long the rest may take.

    Example: `with WorkProgress(console) as progress: progress.tell("math: tree done", 0.25)`, a minute after the
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
