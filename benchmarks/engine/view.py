"""Tables of the engine benchmark's report."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NOTE = "five to seven minutes, one of which trains the small policy whose rollouts are drafted"


def show(report: dict[str, Any], console: Console) -> None:
    """A table per question, and the machine."""
    facts = report["environment"]
    console.print(f"tokens per second by wall time on {facts['cpu']}, median of {facts['runs']}", soft_wrap=True)
    tables = speed_table, drafting_table, equal_table, control_table, flip_table
    for table in (make_table(report) for make_table in tables):
        console.print()
        console.print(table)


def speed_table(report: dict[str, Any]) -> Table:
    """Plain decoding: a row per batch size, both sides at their best settings."""
    facts = report["environment"]["speed"]
    title = (
        f"plain decoding, {_millions(facts)} parameters, prompts of {facts['prompt_length']}, responses of "
        f"{facts['response_length']}"
    )
    table = _table(title, "batch", "generate", "fastest with", "engine", "fastest with", "ratio")
    for result in report["speed"]:
        generate, engine = result["generate"], result["engine"]
        table.add_row(
            str(result["batch_size"]),
            f"{generate['tokens_per_s']:,.0f}",
            f"{generate['setting']['cache']} cache, {_threads(generate['setting'])}",
            f"{engine['tokens_per_s']:,.0f}",
            _threads(engine["setting"]),
            f"{result['ratio']:.2f}x",
        )
    return table


def drafting_table(report: dict[str, Any]) -> Table:
    """Drafting: a row per batch size; the ratio is drafting over plain."""
    facts = report["environment"]["drafting"]
    title = (
        f"drafting, {_millions(facts)} parameters, {facts['accuracy']:.0%} right, {facts['num_prompts']} prompts x "
        f"{facts['group_size']}, threads as are best"
    )
    names = ("generate", "plain", "drafting", "ratio", "per pass", "accepted", "drafted", "changed")
    table = _table(title, "batch", *names)
    for result in report["drafting"]:
        table.add_row(*_drafting_cells(result, result["drafting"]))
    return table


def equal_table(report: dict[str, Any]) -> Table:
    """What computing rows with the same tokens once brings: a row per batch size, ratios over every row by itself."""
    names = ("each row", "equal ones once", "ratio", "and drafting", "ratio")
    table = _table("tokens a second, rows with the same tokens computed once", "batch", *names)
    for result in report["drafting"]:
        drafted = result["drafting"]
        table.add_row(
            str(result["batch_size"]),
            *(f"{result[name]:,.0f}" for name in ("each_tokens_per_s", "plain_tokens_per_s")),
            f"{result['each_ratio']:.2f}x",
            f"{drafted['tokens_per_s']:,.0f}",
            f"{drafted['ratio_to_each']:.2f}x",
        )
    return table


def control_table(report: dict[str, Any]) -> Table:
    """What a drafter costs or saves, in pairs of runs: a row per history."""
    table = _table(
        "with a drafter over without, in pairs", "history", "ratio", "low", "high", "pairs", "drafted", "changed"
    )
    for case, result in report["controls"].items():
        table.add_row(
            case,
            *(f"{result[name]:.2f}x" for name in ("ratio", "low", "high")),
            str(result["num_pairs"]),
            f"{result['drafted_per_forward']:.2f}",
            f"{result['num_differing']}/{result['num_rollouts']}",
        )
    return table


def flip_table(report: dict[str, Any]) -> Table:
    """Flips: a row per data type and change."""
    table = _table("against one rollout at a time", "dtype", "backend", "change", "differing", "flips per token")
    for result in report["flips"]:
        table.add_row(
            result["dtype"],
            result["backend"],
            f"{result['change']} of {result['batch_size']}",
            f"{result['num_differing']} of {result['num_rollouts']}",
            f"{result['num_differing']} in {result['num_compared']:,}",
        )
    return table


def _drafting_cells(result: dict[str, Any], drafted: dict[str, Any]) -> list[str]:
    return [
        str(result["batch_size"]),
        f"{result['generate_tokens_per_s']:,.0f}",
        f"{result['plain_tokens_per_s']:,.0f}",
        f"{drafted['tokens_per_s']:,.0f}",
        f"{drafted['ratio']:.2f}x",
        f"{drafted['tokens_per_forward']:.2f}",
        f"{drafted['acceptance']:.0%}",
        f"{drafted['drafted_per_forward']:.2f}",
        f"{drafted['num_differing']}/{result['num_rollouts']}",
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _threads(setting: dict[str, Any]) -> str:
    count = setting["num_threads"]
    return f"{count} thread{'s' if count > 1 else ''}"


def _millions(facts: dict[str, Any]) -> str:
    return f"{facts['num_parameters'] / 1e6:.2f} M"
