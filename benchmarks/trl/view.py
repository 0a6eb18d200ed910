"""Tables of the TRL benchmark's report."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "about five minutes"


def show(report: dict[str, Any], console: Console) -> None:
    """A row per case, and TRL's own packing of the same rows."""
    facts = report["environment"]
    console.print(
        f"seconds of a step on {facts['cpu']}, {facts['threads']} thread, process time, median of {facts['runs']}; "
        f"trl {facts['versions']['trl']}",
        soft_wrap=True,
    )
    rows = [
        (
            row["case"],
            f"{row['token_ratio']:.2f}x",
            f"{row['flop_bound']:.2f}x",
            f"{row['padded_tokens'] / row['flat_tokens']:.2f}x",
            f"{row['stock_s']:.2f}",
            f"{row['tree_s']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['share_of_flop_bound']:.2f}",
            f"{row['gradient_difference']:.0e}",
        )
        for row in report["cases"]
    ]
    columns = (
        "case",
        "token ratio",
        "FLOP bound",
        "padding",
        "stock",
        "tree",
        "speedup",
        "of FLOP bound",
        "gradients apart",
    )
    console.print(figures_table(None, columns, rows))
    packing = [
        (
            row["case"],
            f"{row['tree_row']['kv_rows_per_token']:.2f}",
            f"{row['tree_row']['pack_us_per_flat_token']:.2f}",
            f"{row['pack_us_per_flat_token']:.3f}",
        )
        for row in report["cases"]
    ]
    names = ("case", "TreeRow: K/V rows a token", "TreeRow: packing, us a token", "ours: packing, us a token")
    console.print(figures_table(None, names, packing))
