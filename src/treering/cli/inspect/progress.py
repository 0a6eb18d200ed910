"""How a long measure shows that it is alive: a bar on stderr with its rate and the time that is left.

Knows stages, counts and units; nothing of what is measured. Where stderr is no terminal nothing is shown.
"""

import sys

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from treering.cli.live import LiveLine


class InspectProgress(LiveLine):
    """One bar that begins again with each stage; use it in a `with` statement.

    Example: `progress.begin("drafting", 4_000_000, "tokens")` and half a minute later `progress.advance(3_000_000)`
    show `drafting`, a bar three quarters full, `100,000 tokens/s` and ten seconds left.
    """

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f} %"),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        super().__init__(Console(stderr=True), *columns, is_live=sys.stderr.isatty())
        self._job = self._live.add_task("preparing", total=None, unit="")

    def begin(self, stage: str, total: int, unit: str) -> None:
        """The stage that comes now, and how many of what it will go through."""
        self._live.remove_task(self._job)
        self._job = self._live.add_task(stage, total=total, unit=unit)

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._live.advance(self._job, count)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} {task.fields['unit']}/s")
