"""Show a running command to a person: a bar with the newest figures on a terminal, plain lines elsewhere."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from treering import metrics
from treering.report.run_data import eval_names, number

if TYPE_CHECKING:
    # It imports torch.
    from treering.train.progress import Phase

PART_EVERY_S = 30.0
"""If stderr is not a terminal, a running step prints a line after this many seconds without one."""

LINE_EVERY_S = 120.0
"""If stderr is not a terminal, `WorkProgress` prints at most one line per this many seconds."""

NUM_PLAIN_LINES = 10
"""Most step lines per run if stderr is not a terminal."""

_UNITS = {"starting": "processes", "sampling": "rollouts", "scoring": "tokens", "training": "tokens"}


class PlainConsole(Console):
    """Console that prints text as it is: "[train]" is not markup and ":key:" no emoji; lines of text are not broken.

    Example: `PlainConsole().print("pip install 'x[train]'")` keeps the brackets.
    """

    def __init__(self, **options: Any) -> None:
        """Pass on rich's options."""
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)


def note_compiling(console: Console, *functions: Any) -> None:
    """Print one line if numba will compile any of the functions, as it does once after installation.

    Args:
        console: writes to stderr.
        functions: made by `compiled_once`; each stands for those that its command compiles with it.
    """
    # This loads numba, which takes a second.
    from treering.compiling.once import is_compiled

    if not all(map(is_compiled, functions)):
        names = ", ".join(function.__name__ for function in functions if not is_compiled(function))
        line = f"compiling functions with numba, once after installation: {names}; this takes some seconds"
        console.print(line)


@contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Print the warnings of the block as they come, each as one line without its code.

    Example: a history on a full disk prints "warning: history could not be written to ...".
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.print(f"warning: {message}")
        yield


class RunDisplay:
    """Display of a run's steps; use it in a `with` statement.

    Off a terminal it prints a line for each tenth of the steps, and more often where they take long.

    Example: `with RunDisplay(title="runs/a", num_steps=60, first_step=0, console=console) as display:
    display.show(1, step_figures(report.values()))` moves the bar, or prints `step 1/60 loss 4.211 tokens/s 7,910
    sharing 0.26`.
    """

    def __init__(self, *, title: str, num_steps: int, first_step: int, console: Console, unit: str = "step") -> None:
        """Start after `first_step` of `num_steps` steps; `unit` begins a plain line; `console` writes to stderr."""
        self._console, self._unit = console, unit
        self._num_steps, self._num_done = num_steps, first_step
        self._every = max(1, -(-(num_steps - first_step) // NUM_PLAIN_LINES))
        self._phase: tuple[str, int] = "", 0
        self._phase_started = self._last_line = time.monotonic()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task(title, total=num_steps, completed=first_step)
        # The console would cut a long line.
        self._below = Text(no_wrap=False, overflow="fold")
        self._live = Live(Group(self._bar, self._below), console=console, transient=True, refresh_per_second=4)

    def show(self, step: int, text: str) -> None:
        """Show that `step` is done, with the caller's text."""
        self._num_done = step
        self._bar.update(self._task, completed=step)
        self._below.plain = text
        is_due = step % self._every == 0 or step == self._num_steps
        if is_due and not self._console.is_terminal:
            self._print(f"{self._unit} {step}/{self._num_steps} {text}")

    def show_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print the metrics of held-out data after a step; for `Evaluation.on_measured`.

        Example: `step 20/60: eval loss 2.317`.
        """
        parts = [f"{words} {values[name]:.3f}" for name, words in eval_names([values]).items()]
        self._print(f"{self._unit} {step}/{self._num_steps}: eval {'   '.join(parts)}")

    def show_phase(self, phase: "Phase", num_done: int, num_total: int) -> None:
        """Show how far the running step is; an `OnProgress`, for a loop's `on_progress`.

        Example: 3 of 16 rollouts after 30 s are `sampling 3 of 16 rollouts, 2 min 10 s left`.
        """
        now, before = time.monotonic(), self._phase
        self._phase = phase, num_done
        if num_done == 0 and self._phase != before:
            self._phase_started = now
        text = f"{phase} {num_done:,} of {num_total:,} {_UNITS[phase]}"
        if 0 < num_done < num_total:
            seconds = now - self._phase_started
            text += f", {duration(seconds / num_done * (num_total - num_done))} left"
        self._below.plain = text
        if not self._console.is_terminal and now - self._last_line >= PART_EVERY_S:
            self._print(f"{self._unit} {self._num_done + 1}/{self._num_steps}: {text}")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(line)


def step_figures(row: Mapping[str, Any]) -> str:
    """Format the score, speeds, drafts and sharing of a step, as far as its metrics have them.

    Example: "reward 0.188 tokens/s 90 tokens/forward 4.00 drafts accepted 50%".
    """
    values = {name: value for name in row if (value := number(row[name])) is not None}
    score, name = ("reward", metrics.REWARD_MEAN) if metrics.NUM_SAMPLED in row else ("loss", metrics.LOSS)
    parts = {
        "tokens/s {:,.0f}": values.get(metrics.SAMPLED_PER_S, values.get(metrics.TOKENS_PER_S)),
        "tokens/forward {:.2f}": values.get(metrics.TOKENS_PER_FORWARD),
        "drafts accepted {:.0%}": values.get(metrics.ACCEPTANCE) if values.get(metrics.NUM_DRAFTED) else None,
        "sharing {:.2f}": values.get(metrics.SHARING),
    }
    first = f"{score} {values[name]:.3f}" if name in values else f"{score} -"
    return " ".join([first, *(words.format(value) for words, value in parts.items() if value is not None)])


class WorkProgress:
    """Progress of a computation, with the remaining time if the finished share is known; use it in `with`.

    It is a line that is redrawn and then erased on a terminal, and a few plain lines elsewhere.

    Example: `with WorkProgress(console) as progress: progress.show("math: tree done", 0.25)`, a minute after the
    start, shows `math: tree done, 25 %, about 3 min left`.
    """

    def __init__(self, console: Console) -> None:
        """`console` writes to stderr."""
        self.console, self._status = console, console.status("preparing")
        self._began: tuple[float, float] | None = None
        self._done = 0.0
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, words: str, done: float | None = None) -> None:
        """Show the words; `done` is the finished share between 0 and 1, None if unknown; a smaller one begins again."""
        now = time.monotonic()
        text = words if done is None else f"{words}, {done:.0%}{self._left(done, now)}"
        self._status.update(Text(text))
        if not self.console.is_terminal and done is not None and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self.console.print(text)

    def counting(self, words: str, total: int) -> Callable[[int], None]:
        """Return a function that counts further parts of `total` as done, and shows the words with the share.

        Example: after `count = progress.counting("drafting", 400)` and `count(100)` it shows `drafting, 25 %`.
        """
        num_done = 0

        def count(number: int) -> None:
            nonlocal num_done
            num_done += number
            self.show(words, num_done / max(total, 1))

        self.show(words)
        return count

    def _left(self, done: float, now: float) -> str:
        # The speed is measured from the first known share of this work on.
        if self._began is None or done < self._done:
            self._began = done, now
        self._done, (first_done, since) = done, self._began
        if done <= first_done:
            return ""
        seconds = (now - since) / (done - first_done) * (1.0 - done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 60 else ", less than a minute left"


def figures_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table of figures whose first column, on the left, names what the figures on the right belong to.

    A word too long for its column continues in the next line: nothing is cut off.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """Make a table with a row per fact: its name and its value."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def duration(seconds: float) -> str:
    """Write a duration. Example: 42 is "42 s", 150 is "2 min 30 s", 7,300 is "2 h 1 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
