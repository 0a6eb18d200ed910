"""Tables of a benchmark's report, drawn alike for all: a heading for each of its lists, and columns by their paths."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Tables = Mapping[str, Sequence[str]]
"""By a key of the report, the columns of its rows: dotted paths in a row."""


def show(report: Mapping[str, Any], tables: Tables, console: "Console") -> None:
    """A table for each key that the report has, and what is too wide for one below it.

    The key "" is the report itself as a single row.
    """
    from treering.cli.display import figures_table

    for key, paths in tables.items():
        rows = _rows(report.get(key, ()) if key else report)
        wide = [path for path in paths if _is_wide([_at(row, path) for row in rows])]
        narrow = [path for path in paths if path not in wide]
        if rows:
            cells = [[in_words(_at(row, path)) for path in narrow] for row in rows]
            console.print(figures_table(key, list(map(_heading, narrow)), cells))
        for row, path in ((row, path) for row in rows for path in wide):
            name = in_words(_at(row, paths[0])) if paths[0] in narrow else ""
            console.print(f"{name} {_heading(path)}: {in_words(_at(row, path))}", soft_wrap=True, highlight=False)


def in_words(value: Any) -> str:
    """A value of a report: three digits of a number, all of a larger one, each entry of a table in a table.

    Example: {"a": 0.51234, "b": [1234, None]} is "a 0.512, b 1,234".
    """
    if isinstance(value, Mapping):
        return _joined(f"{name} {in_words(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return _joined(map(in_words, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _is_wide(values: Sequence[Any]) -> bool:
    """Whether a column holds tables of numbers or of tables; settings, which have a word among them, fit a cell."""
    tables = [value for value in values if isinstance(value, list | Mapping)]
    words = (entry for table in tables if isinstance(table, Mapping) for entry in table.values())
    return bool(tables) and not any(isinstance(entry, str) for entry in words)


def _heading(path: str) -> str:
    return path.replace(".", " ").replace("_", " ")


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)


def _rows(found: Any) -> list[Mapping[str, Any]]:
    """A list of rows, tables of rows or of lists of them by `name`, or a single row."""
    if not isinstance(found, Mapping):
        return list(found)
    if not all(isinstance(entry, list | Mapping) for entry in found.values()):
        return [found]
    return [{"name": name, **row} for name, entry in found.items() for row in _rows(entry)]


def _at(row: Any, path: str) -> Any:
    """The value at a dotted path; None where the row has none."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row
