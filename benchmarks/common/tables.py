"""Tables on a terminal, alike in all reports."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of cells, the first column on the left and numbers on the right."""
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        found.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        found.add_row(*row)
    return found
