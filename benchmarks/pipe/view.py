"""Tables of the pipe benchmark's report."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NOTE = "about twenty minutes, one of which trains the small policy that is trained on"


def show(report: dict[str, Any], console: Console) -> None:
    """A row per policy, staleness and drafts; and the machine."""
    facts = report["environment"]
    size = facts["size"]
    console.print(
        f"seconds per step on {facts['cpu']}, {facts['num_processors']} processors, {facts['workers']} workers, median "
        f"of {facts['runs']}; {size['prompts_per_step']} x {size['group_size']} rollouts a step",
        soft_wrap=True,
    )
    console.print()
    console.print(policy_table(report))


def policy_table(report: dict[str, Any]) -> Table:
    """Measured and predicted side by side; a star marks the policy that gains are over."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("stale", "drafts", "step", "predicted", "ratio", "gain", "predicted", "bubble", "predicted", "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["policies"]:
        table.add_row(
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
    return table
