"""Table of the weights benchmark's report."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "about two minutes; needs Ray (make ray-test sets an environment up) and four times the largest size of memory"


def show(report: dict[str, Any], console: Console) -> None:
    """Seconds of each part, by size."""
    if not report["sizes"]:
        return
    stores = list(report["sizes"][0]["seconds"])
    console.print(
        figures_table(
            f"seconds from the trainer's weights to the worker's, {report['environment']['cpu']}",
            ("MiB", *(f"{store}: {part}" for store in stores for part in ("publish", "load", "both"))),
            [
                (
                    str(each["size_mib"]),
                    *(
                        f"{seconds:.3f}"
                        for store in stores
                        for publish, load in [(each["seconds"][store]["publish_s"], each["seconds"][store]["load_s"])]
                        for seconds in (publish, load, publish + load)
                    ),
                )
                for each in report["sizes"]
            ],
        )
    )
    console.print(
        figures_table(
            "on Ray, in virtual time: seconds of a step, and of its controller",
            ("workers", "rollouts", "hand-over", "step", "step, free hand-over", "messages", "wakes, at most"),
            [
                (
                    f"{row['num_workers']:,}",
                    f"{row['num_rollouts']:,}",
                    *(f"{row[name]:.2f}" for name in ("load_s", "step_s", "step_without_load_s")),
                    *(f"{row[name]:.2f}" for name in ("messages_s", "wakes_s")),
                )
                for row in report["scale"]
            ],
        )
    )
