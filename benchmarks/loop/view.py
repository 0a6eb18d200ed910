"""Tables of the loop benchmark's report."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "about ten minutes, one of which trains the small policy that is trained on"

_SHARES = ("rollout", "train", "update", "trainer_waits", "engines_wait")


def show(report: dict[str, Any], console: Console) -> None:
    """A row per variant with its shares of the step; each part's gain alone and on top of those before it."""
    facts, product = report["environment"], report["product"]
    size = facts["size"]
    console.print(
        f"seconds per step on {facts['cpu']}, {facts['num_processors']} processors, median of {facts['runs']}; "
        f"{size['prompts_per_step']} x {size['group_size']} rollouts a step",
        soft_wrap=True,
    )
    variants = [
        (
            row["variant"]["name"],
            f"{row['step_s']:.3f}",
            f"{row['speedup']:.2f}x",
            *(f"{row['shares'][name]:.0%}" for name in _SHARES),
        )
        for row in report["variants"]
    ]
    columns = ("variant", "step", "speedup", "rollout", "train", "update", "trainer waits", "engines wait")
    console.print(figures_table(None, columns, variants))
    factors = [
        (name, f"{factor:.2f}x", f"{product['ladder'][name]:.2f}x") for name, factor in product["factors"].items()
    ]
    factors.append(("product", f"{product['product']:.2f}x", f"{product['whole']:.2f}x"))
    console.print(figures_table(None, ("part", "alone", "on top"), factors))
