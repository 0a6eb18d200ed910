"""Tables of the draft benchmark's report."""

from itertools import groupby
from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "up to a few minutes, most of them for the grid of Arctic's configurations where it is installed"


def show(report: dict[str, Any], console: Console) -> None:
    """A table per history: a row per drafter and configuration, the most tokens per step first; ratios below.

    Then, how often estimates of each size came true.
    """
    facts = report["environment"]
    console.print(
        f"{report['file']}: {facts['num_sampled_tokens']:,} sampled tokens of {facts['num_rollouts']:,} rollouts, "
        f"{facts['num_tasks']:,} tasks, replayed on {facts['cpu']}",
        soft_wrap=True,
    )
    for history, rows in groupby(report["drafters"], key=lambda row: row["history"]):
        given = sorted(rows, key=lambda row: -row["tokens_per_step"])
        columns = ("drafter", "per step", "drafted", "right", "us/row", "B/token")
        console.print()
        console.print(figures_table(f"history: {history}", columns, [_cells(row) for row in given]))
        for row in given:
            if "ratio_to_best_arctic" in row:
                console.print(f" {_name(row)} / best Arctic: {row['ratio_to_best_arctic']:.3f}", highlight=False)
    for history, bins in report["reliability"].items():
        if history in ("siblings", "earlier"):
            cells = [(f"{one['estimate']:.3f}", f"{one['accepted']:.3f}", f"{one['num_drafted']:,}") for one in bins]
            # Not the table's title, which would be as narrow as its numbers.
            console.print(f"\nestimates of treering, history: {history}", highlight=False)
            console.print(figures_table(None, ("estimated", "accepted", "drafted tokens"), cells))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _name(row),
        f"{row['tokens_per_step']:.2f}",
        f"{row['drafted_per_step']:.2f}",
        f"{row['precision']:.0%}",
        f"{row['us_per_row']:.1f}",
        f"{row['bytes_per_token']:.0f}",
    )


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["drafter"], *(str(value) for value in row.get("config", {}).values())])
