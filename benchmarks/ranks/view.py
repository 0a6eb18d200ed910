"""Tables of the ranks benchmark's report."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "several minutes; needs the real-data folder (TREERING_DATA)"


def show(report: dict[str, Any], console: Console) -> None:
    """Tokens per second of each way, and how uneven shares are."""
    if not report["sets"]:
        return
    ways = list(report["sets"][0]["seconds"])
    console.print(
        figures_table(
            f"flat tokens per second, wall time (CPU seconds of the slowest rank), {report['environment']['cpu']}",
            ("set", "flat tokens", *(way.replace("_", " ") for way in ways)),
            [
                (
                    each["name"],
                    f"{each['flat_tokens']:,}",
                    *(f"{each['flat_tokens_per_s'][way]:,.0f} ({each['seconds'][way]['cpu_s']:.1f})" for way in ways),
                )
                for each in report["sets"]
            ],
        )
    )
    counts = list(report["sets"][0]["busiest_over_mean"])
    console.print(
        figures_table(
            f"tokens of the busiest rank over the mean, steps of {report['environment']['trees_per_step']} trees",
            ("set", *(f"{count} ranks, {way}" for count in counts for way in ("in turn", "by cost"))),
            [
                (
                    each["name"],
                    *(
                        f"{each['busiest_over_mean'][count][way]:.2f}"
                        for count in counts
                        for way in ("equal_counts", "by_cost")
                    ),
                )
                for each in report["sets"]
            ],
        )
    )
