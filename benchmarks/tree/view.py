"""Tables of the tree benchmark's report."""

from typing import Any

from rich.console import Console
from rich.table import Table

from treering.cli.display.tables import figures_table

NOTE = (
    "three cases and two trees in partitions in about four minutes, then samples of real trajectories in about 45 "
    "minutes on 2 cores; --only NAMES measures some"
)


def show(report: dict[str, Any], console: Console) -> None:
    """A table of the cases, every baseline below it, one of the partitioned trees, and two of the sets."""
    if report.get("cases"):
        console.print(_case_table(report))
        for case in report["cases"]:
            seconds = ", ".join(f"{name} {value:.3f} s" for name, value in case["baselines"].items())
            console.print(f"{case['case']}: {seconds}; the baseline is {case['baseline']}", soft_wrap=True)
            for name, peer in case["peers"].items():
                console.print(f"  {name}: {peer['speedup']:.2f}x in {peer['seconds']:.3f} s", soft_wrap=True)
    if report.get("partitions"):
        console.print(_partition_table(report["partitions"]))
    if report.get("sets"):
        console.print(_speed_table(report))
        console.print(_sharing_table(report["sets"]))


def _case_table(report: dict[str, Any]) -> Table:
    facts = report["environment"]
    return figures_table(
        f"one forward and backward on {facts['cpu']}, {facts['threads']} thread, median of {facts['runs']}",
        ("case", "flat tokens", "unique", "FLOP bound", "baseline s", "tree s", "speedup", "of bound", "grad error"),
        [
            (
                case["case"],
                f"{case['flat_tokens']:,}",
                f"{case['unique_tokens']:,}",
                f"{case['flop_bound']:.2f}x",
                f"{case['baseline_s']:.3f}",
                f"{case['tree_s']:.3f}",
                f"{case['speedup']:.2f}x",
                f"{case['speedup'] / case['flop_bound']:.0%}",
                f"{case['grad_error']:.0e}",
            )
            for case in report["cases"]
        ],
    )


def _partition_table(results: list[dict[str, Any]]) -> Table:
    """A row for each tree, objective and way: time, memory and gradient against the whole tree."""
    return figures_table(
        "trees of ten times the budget, against the whole tree at one time",
        ("tree", "loss", "parents", "s", "of whole", "scoring s", "computed twice", "saved MB", "grad error"),
        [_partition_cells(result, *key.split()) for result in results for key in result["seconds"]],
    )


def _partition_cells(result: dict[str, Any], loss: str, way: str) -> tuple[str, ...]:
    seconds = result["seconds"][f"{loss} {way}"]
    return (
        result["tree"],
        loss,
        way,
        f"{seconds:.2f}",
        f"{seconds / result['seconds'][f'{loss} whole']:.2f}x",
        f"{result['scoring_s']:.2f}" if (loss, way) == ("gspo", "keep") else "",
        "" if way == "whole" else f"{result['num_recomputed_tokens'][way]:,}",
        f"{result['saved_bytes'][way] / 1e6:.0f}" if loss == "sft" else "",
        f"{result['grad_errors'][f'{loss} {way}']:.0e}",
    )


def _speed_table(report: dict[str, Any]) -> Table:
    """Seconds and memory of each set; a star marks sets that are held to a share of the FLOP bound."""
    facts = report["environment"]["sets"]
    return figures_table(
        f"bench sets, {facts['model']['name']}, {facts['threads']} threads, wall time, micro-batches of "
        f"{facts['max_tokens']:,} tokens",
        ("set", "baseline", "s", "tree s", "speedup", "FLOP bound", "of bound", "kB/token", "flat", "grad error"),
        [
            (
                _name(result),
                result["baseline"],
                f"{result['baseline_s']:.2f}",
                f"{result['tree_s']:.2f}",
                f"{result['speedup']:.2f}x" if result["overhead"] is None else f"{result['overhead']:+.1%}",
                f"{result['counts']['flop_bound']:.2f}x",
                f"{result['flop_bound_share']:.0%}",
                f"{result['saved_bytes'] / result['tokens_at_peak'] / 1e3:.0f}",
                f"{result['flat_saved_bytes'] / result['flat_tokens_at_peak'] / 1e3:.0f}",
                f"{result['grad_error']:.0e}",
            )
            for result in report["sets"]
        ],
    )


def _sharing_table(results: list[dict[str, Any]]) -> Table:
    return figures_table(
        "their samples; mean segment in tokens",
        ("set", "tasks", "branches", "flat tokens", "unique", "sharing", "segment", "token bound"),
        [
            (
                _name(result),
                f"{counts['num_tasks']} of {counts['num_tasks_of_set']}",
                str(counts["num_branches"]),
                f"{counts['flat_tokens']:,}",
                f"{counts['unique_tokens']:,}",
                f"{counts['sharing']:.2f}",
                f"{counts['mean_segment']:.0f}",
                f"{counts['token_bound']:.2f}x",
            )
            for result in results
            for counts in [result["counts"]]
        ],
    )


def _name(result: dict[str, Any]) -> str:
    return f"{result['set']}{' *' if result['counts']['gated'] else ''}"
