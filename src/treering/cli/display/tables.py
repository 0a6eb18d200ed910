"""Tables on a terminal, alike in all reports."""

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def figures_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Rows of cells: the first column, on the left, names what the figures on the right belong to.

    A word that is too long for its column goes on in the next line: nothing is cut off.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """A row per fact: its name and what it is."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table
