"""What saving a run costs, as a line on stderr."""

from rich.console import Console

from treering.cli.display.panel import in_words
from treering.train.loop.saving import Saved

_UNITS = ("kB", "MB", "GB", "TB")


class SavingNote:
    """Says once what saving costs; an `on_saved` of `run_steps`.

    Example: after the first checkpoint `saving takes 0.4 s (35 MB), every 10 min 0 s`.
    """

    def __init__(self, console: Console) -> None:
        """`console` writes to stderr."""
        self._console = console
        self._is_said = False

    def __call__(self, saved: Saved) -> None:
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
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if size < 10 else f"{size:.0f} {_UNITS[unit]}"
