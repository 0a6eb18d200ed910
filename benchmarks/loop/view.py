"""Tables of the loop benchmark's report."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NOTE = "about ten minutes, one of which trains the small policy that is trained on"

_SHARES = ("rollout", "train", "update", "trainer_waits", "engines_wait")


def show(report: dict[str, Any], console: Console) -> None:
    """A row per variant, the factors, and the machine."""
    facts = report["environment"]
    size = facts["size"]
    console.print(
        f"seconds per step on {facts['cpu']}, {facts['num_processors']} processors, median of {facts['runs']}; "
        f"{size['prompts_per_step']} x {size['group_size']} rollouts a step",
        soft_wrap=True,
    )
    for table in (variant_table(report), product_table(report)):
        console.print()
        console.print(table)


def variant_table(report: dict[str, Any]) -> Table:
    """Step times, speedups over the plain loop, and where the time went."""
    table = _table("variant", "step", "speedup", "rollout", "train", "update", "trainer waits", "engines wait")
    for row in report["variants"]:
        table.add_row(
            row["variant"]["name"],
            f"{row['step_s']:.3f}",
            f"{row['speedup']:.2f}x",
            *(f"{row['shares'][name]:.0%}" for name in _SHARES),
        )
    return table


def product_table(report: dict[str, Any]) -> Table:
    """What each part gains alone and on top of the others; below, what all gain together."""
    product = report["product"]
    table = _table("part", "alone", "on top")
    for name, factor in product["factors"].items():
        table.add_row(name, f"{factor:.2f}x", f"{product['ladder'][name]:.2f}x")
    table.add_row("product", f"{product['product']:.2f}x", f"{product['whole']:.2f}x")
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
