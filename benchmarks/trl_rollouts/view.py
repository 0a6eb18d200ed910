"""Tables of the report on TRL's rollouts."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "about fifteen minutes, two of which train the small policy"


def show(report: dict[str, Any], console: Console) -> None:
    """A row per run and epoch, and the learning of both ways."""
    console.print(f"microseconds of a sampled token on {report['environment']['cpu']}, process time", soft_wrap=True)
    rows = [
        (
            f"{run['num_prompts']} prompts, batch {run['batch']}",
            str(epoch["epoch"] + 1),
            f"{epoch['off_us']:.0f}",
            f"{epoch['auto_us']:.0f}",
            f"{epoch['tokens_per_forward']:.2f}",
            f"{run['ratio']:.2f}x" if epoch["epoch"] == 2 else "",
            f"{run['control_ratio']:.2f}x" if epoch["epoch"] == 2 else "",
        )
        for run in report["runs"]
        for epoch in run["epochs"]
    ]
    columns = ("run", "epoch", "drafts off", "auto", "tokens per forward", "whole run", "control")
    console.print(figures_table(None, columns, rows))
    if report["learning"]:
        learnt = [
            (way, f"{found['last_mean']:.3f}", f"{found['last_stdev']:.3f}", str(len(found["rewards"])))
            for way, found in report["learning"].items()
        ]
        console.print(figures_table("reward of the last epoch", ("rollouts by", "mean", "deviation", "seeds"), learnt))
