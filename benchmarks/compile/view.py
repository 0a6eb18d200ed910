"""Tables of the benchmark of compiling."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "each part in a process with an empty cache, under a minute in all; seconds are those of one processor"
_NUM_SHOWN = 20


def show(report: dict[str, Any], console: Console) -> None:
    """A table of the parts, and one of the slowest functions."""
    parts = report["parts"]
    console.print(
        figures_table(
            "by part, imports and running included",
            ("part", "s", "compiling", "functions"),
            [
                (
                    part["name"],
                    f"{part['seconds']:.1f}",
                    f"{sum(row['seconds'] for row in part['functions']):.1f}",
                    str(len(part["functions"])),
                )
                for part in parts
            ],
        )
    )
    rows = [(row["seconds"], part["name"], row) for part in parts for row in part["functions"]]
    console.print(
        figures_table(
            f"the {_NUM_SHOWN} slowest functions, without those that they call",
            ("part", "function", "s", "types"),
            [
                (name, row["function"].removeprefix("treering."), f"{seconds:.2f}", str(row["num_types"]))
                for seconds, name, row in sorted(rows, key=lambda entry: -entry[0])[:_NUM_SHOWN]
            ],
        )
    )
    for failure in report["failures"]:
        console.print(f"too slow to compile: {failure}")
