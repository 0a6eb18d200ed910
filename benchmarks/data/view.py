"""The table of the benchmark of large files."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "a minute for 13 MB, and some ten for 1.3 GB of text on quiet cores; `--only '13 MB'` takes one file"


def show(report: dict[str, Any], console: Console) -> None:
    """A row per file and command."""
    rows = [
        (each["file"], name, f"{command['seconds']:.1f}", f"{command['peak_mb']:,.0f}")
        for each in report["files"]
        for name, command in each["commands"].items()
    ]
    console.print(figures_table(None, ("file", "command", "s of a processor", "peak MB"), rows))
