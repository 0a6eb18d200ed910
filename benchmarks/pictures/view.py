"""A table of the benchmark of pictures."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "a group of completions after two pictures, on one thread; about a minute"


def show(report: dict[str, Any], console: Console) -> None:
    """One row per way, and what the tree step reaches of its bound."""
    rows = [(name, f"{seconds:.3f}") for name, seconds in report["seconds"].items()]
    console.print(figures_table("seconds per step, tower included", ("way", "s"), rows))
    console.print(
        f"{report['speedup']:.2f}x, {report['share_of_bound']:.2f} of the FLOP bound {report['flop_bound']:.2f}; "
        f"gradients differ by {report['gradient_difference']:.1e}"
    )
