"""The table of the pipe benchmark's report."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "about twenty minutes, one of which trains the small policy that is trained on"


def show(report: dict[str, Any], console: Console) -> None:
    """A row per policy, staleness and drafts, measured and predicted; a star marks the policy that gains are over."""
    facts = report["environment"]
    size = facts["size"]
    console.print(
        f"seconds per step on {facts['cpu']}, {facts['num_processors']} processors, {facts['workers']} workers, median "
        f"of {facts['runs']}; {size['prompts_per_step']} x {size['group_size']} rollouts a step",
        soft_wrap=True,
    )
    columns = ("policy", "stale", "drafts", "step", "predicted", "ratio", "gain", "predicted", "bubble", "predicted")
    rows = [
        (
            row["policy"] + ("*" if row["is_base"] else ""),
            str(row["staleness"]),
            row["drafts"],
            f"{row['step_s']:.3f}",
            f"{row['predicted_step_s']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['predicted_speedup']:.2f}x",
            f"{row['bubble']:.0%}",
            f"{row['predicted_bubble']:.0%}",
            str(row["num_differing"]),
        )
        for row in report["policies"]
    ]
    console.print(figures_table(None, (*columns, "differ"), rows))
