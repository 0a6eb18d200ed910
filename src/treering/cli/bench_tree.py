"""How the report of the tree benchmark looks on a terminal.

Knows its keys. Knows nothing of how it was measured.
"""

from types import ModuleType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NOTE = ""
"""Said before it is measured; nothing."""


def hints(report: dict[str, Any], benchmark: ModuleType) -> list[str]:
    """How to measure what was left out."""
    return [] if any(case["peers"] for case in report["cases"]) else [benchmark.HINT]


def show(report: dict[str, Any], console: Console) -> None:
    """The table, and below it every baseline and peer."""
    console.print(as_table(report))
    for case in report["cases"]:
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in case["baselines"].items())
        console.print(f"{case['case']}: {seconds}; the baseline is {case['baseline']}", soft_wrap=True)
        for name, peer in case["peers"].items():
            console.print(f"  {name}: {peer['speedup']:.2f}x in {peer['seconds']:.3f} s", soft_wrap=True)


def as_table(report: dict[str, Any]) -> Table:
    """The cases of a report, a row each."""
    facts = report["environment"]
    title = f"one forward and backward on {facts['cpu']}, {facts['threads']} thread, median of {facts['runs']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for name in ("flat tokens", "unique", "FLOP bound", "baseline s", "tree s", "speedup", "of bound", "grad error"):
        table.add_column(name, justify="right")
    for case in report["cases"]:
        table.add_row(*_cells(case))
    return table


def _cells(case: dict[str, Any]) -> list[str]:
    return [
        case["case"],
        f"{case['flat_tokens']:,}",
        f"{case['unique_tokens']:,}",
        f"{case['flop_bound']:.2f}x",
        f"{case['baseline_s']:.3f}",
        f"{case['tree_s']:.3f}",
        f"{case['speedup']:.2f}x",
        f"{case['speedup'] / case['flop_bound']:.0%}",
        f"{case['grad_error']:.0e}",
    ]
