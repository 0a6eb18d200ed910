"""What `train`, `sft` and `demo` show of their steps: a panel on a terminal, a few plain lines elsewhere."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live

from treering.cli.display.panel import PanelState, as_panel, in_words
from treering.cli.display.progress import StepLines

if TYPE_CHECKING:
    # They import torch, which `treering watch` does not need.
    from treering.train.loop.saving import Saved
    from treering.train.progress import Phase

_UNITS = {"starting": "processes", "sampling": "rollouts", "scoring": "tokens", "training": "tokens"}

_DRAW_EVERY_S = 0.1
"""A panel is drawn anew at most so often within a phase."""


class RunDisplay:
    """The steps of a run; use it in a `with` statement.

    Example: `with RunDisplay(title="runs/a", num_steps=60, first_step=0, console=console) as display:
    display.show({"step": 1, **report.values()})` draws the panel, or prints `step 1/60 loss 4.211 tokens/s 7,910
    sharing 0.26`.
    """

    def __init__(self, *, title: str, num_steps: int, first_step: int, console: Console, unit: str = "step") -> None:
        """`first_step` of `num_steps` steps are done; `unit` begins a plain line; `console` writes to stderr."""
        self._state = PanelState(title=title, num_steps=num_steps, step=first_step)
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
        self._lines = StepLines(num_steps=num_steps, first_step=first_step, console=console, title=unit)
        self._phase: tuple[str, int] = "", 0
        self._phase_started = self._drawn_s = time.monotonic()

    def show(self, row: Mapping[str, Any], *, note: str = "") -> None:
        """Shows one more step.

        Args:
            row: its metrics, with "step".
            note: the panel's last line, and the end of a plain one.
        """
        self._state.add(row)
        self._state.note, self._state.running = note, ""
        if self._live is None:
            figures = [self._state.score, *self._state.figures, *([note] if note else [])]
            self._lines.show(row["step"], " ".join(figures))
        else:
            self._live.update(as_panel(self._state))

    def show_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Shows what held-out data say of the weights after a step; for `Evaluation.on_measured`.

        Example: off a terminal it prints `step 20/60: eval loss 2.317`.
        """
        self._state.add_evaluation(step, values)
        self._state.running = ""
        if self._live is None:
            self._lines.print_now(step, self._state.evaluation.partition(" after")[0])
        else:
            self._live.update(as_panel(self._state))

    def show_phase(self, phase: "Phase", num_done: int, num_planned: int) -> None:
        """Shows how far the running step is; an `OnProgress`, for a loop's `on_progress`.

        Example: 3 of 16 rollouts after 30 s are `sampling 3 of 16 rollouts, 2 min 10 s left`.
        """
        now, before = time.monotonic(), self._phase
        self._phase = phase, num_done
        if num_done == 0 and self._phase != before:
            self._phase_started = now
        elif num_done < num_planned and now < self._drawn_s + _DRAW_EVERY_S:
            return
        self._drawn_s = now
        text = f"{phase} {num_done:,} of {num_planned:,} {_UNITS[phase]}"
        if 0 < num_done < num_planned:
            seconds = now - self._phase_started
            text += f", {in_words(seconds / num_done * (num_planned - num_done))} left"
        self._state.running = text
        if self._live is None:
            self._lines.show_part(text)
        else:
            self._live.update(as_panel(self._state))

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


_BYTES = ("kB", "MB", "GB", "TB")


class SavingNote:
    """Says once what saving costs; an `on_saved` of `run_steps`.

    Example: after the first checkpoint `saving takes 0.4 s (35 MB), every 10 min 0 s`.
    """

    def __init__(self, console: Console) -> None:
        """`console` writes to stderr."""
        self._console = console
        self._is_said = False

    def __call__(self, saved: "Saved") -> None:
        """Prints the line at the first checkpoint."""
        if self._is_said:
            return
        self._is_said = True
        often = "" if saved.wait_s is None else f", every {in_words(saved.wait_s)}"
        size = bytes_in_words(saved.num_bytes)
        self._console.print(f"saving takes {saved.seconds:.1f} s ({size}){often}", soft_wrap=True)


def bytes_in_words(num_bytes: int) -> str:
    """A size with two or three digits. Example: 35,200,000 is "35 MB", and 1,460 is "1.5 kB"."""
    size, unit = num_bytes / 1000, 0
    while size >= 1000 and unit < len(_BYTES) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_BYTES[unit]}" if size < 10 else f"{size:.0f} {_BYTES[unit]}"
