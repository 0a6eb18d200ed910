"""The table of the report on drafts inside vLLM."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "about twenty minutes, ten of which train the small policy"


def show(report: dict[str, Any], console: Console) -> None:
    """A row per method and batch."""
    console.print(f"one thread of {report['environment']['cpu']}, process time", soft_wrap=True)
    none = {case["num_rows"]: case["cpu_s"] for case in report["cases"] if case["method"] == "none"}
    rows = [
        (
            str(case["num_rows"]),
            case["method"],
            f"{case['tokens_per_row_and_step']:.2f}",
            f"{case['accepted_share']:.0%}" if case["num_drafted"] else "",
            f"{case['propose_us_per_row']:.0f}" if case["num_drafted"] else "",
            f"{case['cpu_s']:.2f}",
            f"{case['cpu_s'] / none[case['num_rows']]:.2f}x" if case["num_rows"] in none else "",
        )
        for case in report["cases"]
    ]
    columns = ("rows", "drafts", "tokens a row and step", "accepted", "propose us a row", "CPU s", "of no drafts")
    console.print(figures_table(None, columns, rows))
