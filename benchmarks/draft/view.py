"""Tables of the draft benchmark's report."""

from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NOTE = "up to a few minutes, most of them for the grid of Arctic's configurations where it is installed"


def show(report: dict[str, Any], console: Console) -> None:
    """A table per history: a row per drafter and configuration, the most tokens per step first; ratios below.

    Behind them, how often estimates of each size came true.
    """
    facts = report["environment"]
    console.print(
        f"{report['file']}: {facts['num_sampled_tokens']:,} sampled tokens of {facts['num_rollouts']:,} rollouts, "
        f"{facts['num_tasks']:,} tasks, replayed on {facts['cpu']}",
        soft_wrap=True,
    )
    for history, rows in groupby(report["drafters"], key=lambda row: row["history"]):
        given = list(rows)
        console.print()
        console.print(history_table(history, given))
        for row in given:
            if "ratio_to_best_arctic" in row:
                console.print(f" {_name(row)} / best Arctic: {row['ratio_to_best_arctic']:.3f}", highlight=False)
    for history, bins in report["reliability"].items():
        if history in ("siblings", "earlier"):
            # No title of the table's, which is as narrow as its numbers.
            console.print(f"\nestimates of treering, history: {history}", highlight=False)
            console.print(reliability_table(bins))


def history_table(history: str, rows: list[dict[str, Any]]) -> Table:
    """The rows of one history."""
    table = Table(title=f"history: {history}", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for name in ("per step", "drafted", "right", "us/row", "B/token"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["tokens_per_step"]):
        table.add_row(*_cells(row))
    return table


def reliability_table(bins: list[dict[str, Any]]) -> Table:
    """What estimates of each size came to; they hold where both shares are alike."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("estimated", "accepted", "drafted tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in bins:
        table.add_row(f"{one['estimate']:.3f}", f"{one['accepted']:.3f}", f"{one['num_drafted']:,}")
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _name(row),
        f"{row['tokens_per_step']:.2f}",
        f"{row['drafted_per_step']:.2f}",
        f"{row['precision']:.0%}",
        f"{row['us_per_row']:.1f}",
        f"{row['bytes_per_token']:.0f}",
    ]


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["drafter"], *(str(value) for value in row.get("config", {}).values())])
