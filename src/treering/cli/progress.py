"""How a training run shows itself while it runs: a live line on a terminal, a few plain lines elsewhere.

Knows step reports and where stderr goes. Decides nothing; a run is the same without it.
"""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from treering.cli.live import LiveLine
from treering.train.loop.step_report import StepReport

NUM_PLAIN_LINES = 10
"""Most step lines where stderr is no terminal: enough to follow a log file, few enough to read it."""


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

    def show(self, report: StepReport) -> None:
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

    def _text(self, report: StepReport) -> str:
        seconds = time.perf_counter() - self._started
        sharing = 1.0 - self._num_unique / self._num_flat
        rates = f"{self._num_flat / seconds:,.0f} flat {self._num_unique / seconds:,.0f} unique"
        return f"loss {report.update.loss:.3f} tokens/s {rates} sharing {sharing:.2f}"
