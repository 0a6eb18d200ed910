"""Tables of the distillation benchmark's report."""

from typing import Any

from rich.console import Console

from treering.cli.display.tables import figures_table

NOTE = "a star in a minute, three samples of real trajectories in several more; --only NAMES measures some"


def show(report: dict[str, Any], console: Console) -> None:
    """A table of the batches against the fastest flat way, and one of every way."""
    facts = report["environment"]
    console.print(
        figures_table(
            f"a teacher's forward and a student's step on {facts['cpu']}, {facts['threads']} thread, median of "
            f"{facts['runs']}",
            ("batch", "flat tokens", "unique", "FLOP bound", "baseline", "s", "tree s", "speedup", "of bound"),
            [
                (
                    batch["name"],
                    f"{batch['flat_tokens']:,}",
                    f"{batch['unique_tokens']:,}",
                    f"{batch['flop_bound']:.2f}x",
                    batch["baseline"],
                    f"{batch['baseline_s']:.2f}",
                    f"{batch['tree_s']:.2f}",
                    f"{batch['speedup']:.2f}x",
                    f"{batch['speedup'] / batch['flop_bound']:.0%}",
                )
                for batch in report["batches"]
            ],
        )
    )
    console.print(
        figures_table(
            "every way",
            ("batch", "way", "s", "saved MB", "grad error"),
            [
                (batch["name"], way, f"{seconds:.2f}", f"{batch['saved_bytes'][way] / 1e6:.0f}", f"{error:.0e}")
                for batch in report["batches"]
                for (way, seconds), error in zip(batch["seconds"].items(), batch["grad_errors"].values(), strict=True)
            ],
        )
    )
