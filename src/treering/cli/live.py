"""A live line on stderr for the length of a `with` statement; nothing where stderr is no terminal.

Knows rich. What the line says is known to the files that use it.
"""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class LiveLine:
    """One line that is drawn again and again, gone at the end."""

    def __init__(self, console: Console, *columns: ProgressColumn, is_live: bool) -> None:
        """`console` writes to stderr."""
        self._console = console
        self._live = Progress(*columns, console=console, transient=True, disable=not is_live)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
