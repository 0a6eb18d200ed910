"""Tables of the tree benchmark's report."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.peers.peer import HINT

NOTE = (
    "three cases and two trees in partitions in about four minutes, then samples of real trajectories in about 45 "
    "minutes on 2 cores; --only NAMES measures some"
)


def show(report: dict[str, Any], console: Console) -> None:
    """A table of the cases, every baseline and peer below it, one of the partitioned trees, and two of the sets."""
    if report.get("cases"):
        console.print(case_table(report))
        _show_ways(report["cases"], console)
        if not any(case["peers"] for case in report["cases"]):
            console.print(HINT, soft_wrap=True)
    if report.get("partitions"):
        console.print(partition_table(report))
    if report.get("sets"):
        console.print(speed_table(report))
        console.print(sharing_table(report))


def case_table(report: dict[str, Any]) -> Table:
    """The published cases of a report, a row each."""
    facts = report["environment"]
    title = f"one forward and backward on {facts['cpu']}, {facts['threads']} thread, median of {facts['runs']}"
    table = _table(title, "case")
    for name in ("flat tokens", "unique", "FLOP bound", "baseline s", "tree s", "speedup", "of bound", "grad error"):
        table.add_column(name, justify="right")
    for case in report["cases"]:
        table.add_row(*_case_cells(case))
    return table


def speed_table(report: dict[str, Any]) -> Table:
    """The sets of a report, a row each: seconds and memory. A star marks those held to a share of the FLOP bound."""
    facts = report["environment"]["sets"]
    title = (
        f"bench sets, {facts['model']['name']}, {facts['threads']} threads, wall time, micro-batches of "
        f"{facts['max_tokens']:,} tokens"
    )
    table = _table(title, "set")
    for name in ("baseline", "s", "tree s", "speedup", "FLOP bound", "of bound", "kB/token", "flat", "grad error"):
        table.add_column(name, justify="right")
    for result in report["sets"]:
        table.add_row(*_speed_cells(result))
    return table


def partition_table(report: dict[str, Any]) -> Table:
    """The trees over the budget, a row for each objective and each way: time, memory and gradient beside the whole."""
    table = _table("trees of ten times the budget, against the whole tree at one time", "tree")
    for name in ("loss", "parents", "s", "of whole", "scoring s", "computed twice", "saved MB", "grad error"):
        table.add_column(name, justify="right")
    for result in report["partitions"]:
        for key in result["seconds"]:
            table.add_row(*_partition_cells(result, *key.split()))
    return table


def sharing_table(report: dict[str, Any]) -> Table:
    """What the samples of the sets hold, a row each."""
    table = _table("their samples; mean segment in tokens", "set")
    for name in ("tasks", "branches", "flat tokens", "unique", "sharing", "segment", "token bound"):
        table.add_column(name, justify="right")
    for result in report["sets"]:
        table.add_row(*_sharing_cells(result))
    return table


def _show_ways(cases: list[dict[str, Any]], console: Console) -> None:
    for case in cases:
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in case["baselines"].items())
        console.print(f"{case['case']}: {seconds}; the baseline is {case['baseline']}", soft_wrap=True)
        for name, peer in case["peers"].items():
            console.print(f"  {name}: {peer['speedup']:.2f}x in {peer['seconds']:.3f} s", soft_wrap=True)


def _case_cells(case: dict[str, Any]) -> list[str]:
    return [
        case["case"],
        f"{case['flat_tokens']:,}",
        f"{case['unique_tokens']:,}",
        f"{case['flop_bound']:.2f}x",
        f"{case['baseline_s']:.3f}",
        f"{case['tree_s']:.3f}",
        f"{case['speedup']:.2f}x",
        f"{case['speedup'] / case['flop_bound']:.0%}",
        f"{case['grad_error']:.0e}",
    ]


def _partition_cells(result: dict[str, Any], loss: str, way: str) -> list[str]:
    seconds = result["seconds"]
    has_bytes = loss == "sft"
    return [
        result["tree"],
        loss,
        way,
        f"{seconds[f'{loss} {way}']:.2f}",
        f"{seconds[f'{loss} {way}'] / seconds[f'{loss} whole']:.2f}x",
        f"{result['scoring_s']:.2f}" if (loss, way) == ("gspo", "keep") else "",
        "" if way == "whole" else f"{result['num_recomputed_tokens'][way]:,}",
        f"{result['saved_bytes'][way] / 1e6:.0f}" if has_bytes else "",
        f"{result['grad_errors'][f'{loss} {way}']:.0e}",
    ]


def _speed_cells(result: dict[str, Any]) -> list[str]:
    overhead = result["overhead"]
    return [
        _name(result),
        result["baseline"],
        f"{result['baseline_s']:.2f}",
        f"{result['tree_s']:.2f}",
        f"{result['speedup']:.2f}x" if overhead is None else f"{overhead:+.1%}",
        f"{result['counts']['flop_bound']:.2f}x",
        f"{result['flop_bound_share']:.0%}",
        f"{result['saved_bytes'] / result['tokens_at_peak'] / 1e3:.0f}",
        f"{result['flat_saved_bytes'] / result['flat_tokens_at_peak'] / 1e3:.0f}",
        f"{result['grad_error']:.0e}",
    ]


def _sharing_cells(result: dict[str, Any]) -> list[str]:
    counts = result["counts"]
    return [
        _name(result),
        f"{counts['num_tasks']} of {counts['num_tasks_of_set']}",
        str(counts["num_branches"]),
        f"{counts['flat_tokens']:,}",
        f"{counts['unique_tokens']:,}",
        f"{counts['sharing']:.2f}",
        f"{counts['mean_segment']:.0f}",
        f"{counts['token_bound']:.2f}x",
    ]


def _name(result: dict[str, Any]) -> str:
    return f"{result['set']}{' *' if result['counts']['gated'] else ''}"


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table
