"""A table of the benchmark of pictures."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "a group of completions after two pictures, on one thread; about a minute"


def show(report: dict[str, Any], console: Console) -> None:
    """One row per way, and what the tree step reaches of its bound."""
    peaks = report["peak_bytes"]
    rows = [(name, f"{seconds:.3f}", f"{peaks[name] / 1e6:,.0f}") for name, seconds in report["seconds"].items()]
    console.print(figures_table("a step, tower included, and its peak memory", ("way", "s", "MB"), rows))
    alone = report["peak_bytes_without_sharing"]
    console.print(f"of one completion alone {alone['padded_batch'] / 1e6:,.0f} and {alone['tree'] / 1e6:,.0f} MB")
    console.print(
        f"{report['speedup']:.2f}x, {report['share_of_bound']:.2f} of the FLOP bound {report['flop_bound']:.2f}; "
        f"gradients differ by {report['gradient_difference']:.1e}"
    )
