"""The table of the fault run's report, for a terminal and for docs/faults.md."""

from typing import Any

from rich.console import Console

from benchmarks.faults.judge import ENDINGS
from treering.cli.display.tables import figures_table

NOTE = "about six minutes; `--cases 100` takes about two"
COLUMNS = ("what happens", "cases", *ENDINGS)


def show(report: dict[str, Any], console: Console) -> None:
    """A row per kind with the number of its cases by ending."""
    console.print(
        f"{report['num_cases']} cases from seed {report['seed']} in {report['seconds']:.0f} s, "
        f"{len(report['failures'])} failures",
        soft_wrap=True,
    )
    console.print(figures_table(None, COLUMNS, _rows(report)))


def as_markdown(report: dict[str, Any]) -> str:
    """The same table as it stands in a document."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (COLUMNS, *_rows(report)))
    return "".join([first, f"|{'---|' * len(COLUMNS)}\n", *others])


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(row["kind"], row["num_cases"], *(row[ending] for ending in ENDINGS)) for row in report["kinds"]]
    total = ("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))
    return [tuple(str(cell) for cell in row) for row in [*rows, total]]
