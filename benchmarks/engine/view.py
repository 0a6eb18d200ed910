"""Tables of the engine benchmark's report."""

from typing import Any

from rich.console import Console
from rich.table import Table

from treering.cli.display.tables import figures_table

NOTE = "five to seven minutes, one of which trains the small policy whose rollouts are drafted"


def show(report: dict[str, Any], console: Console) -> None:
    """A table per question, and the machine."""
    facts = report["environment"]
    console.print(f"tokens per second by wall time on {facts['cpu']}, median of {facts['runs']}", soft_wrap=True)
    for make_table in (_speed_table, _drafting_table, _control_table, _flip_table):
        console.print()
        console.print(make_table(report))


def _speed_table(report: dict[str, Any]) -> Table:
    """Plain decoding: a row per batch size, both sides at their best settings."""
    facts = report["environment"]["speed"]
    return figures_table(
        f"plain decoding, {_millions(facts)} parameters, prompts of {facts['prompt_length']}, responses of "
        f"{facts['response_length']}",
        ("batch", "generate", "cache", "threads", "engine", "threads", "ratio"),
        [
            (
                str(result["batch_size"]),
                f"{result['generate']['tokens_per_s']:,.0f}",
                result["generate"]["setting"]["cache"],
                str(result["generate"]["setting"]["num_threads"]),
                f"{result['engine']['tokens_per_s']:,.0f}",
                str(result["engine"]["setting"]["num_threads"]),
                f"{result['ratio']:.2f}x",
            )
            for result in report["speed"]
        ],
    )


def _drafting_table(report: dict[str, Any]) -> Table:
    """Drafting: a row per batch size. `each` computes every row for itself, `plain` rows with the same tokens once."""
    facts = report["environment"]["drafting"]
    return figures_table(
        f"drafting, {_millions(facts)} parameters, {facts['accuracy']:.0%} right, {facts['num_prompts']} prompts x "
        f"{facts['group_size']}, threads as are best",
        (
            *("batch", "generate", "each", "plain", "drafting", "of each", "of plain", "per pass", "accepted"),
            *("drafted", "changed"),
        ),
        [
            (
                str(result["batch_size"]),
                f"{result['generate_tokens_per_s']:,.0f}",
                f"{result['each_tokens_per_s']:,.0f}",
                f"{result['plain_tokens_per_s']:,.0f}",
                f"{drafted['tokens_per_s']:,.0f}",
                f"{drafted['ratio_to_each']:.2f}x",
                f"{drafted['ratio']:.2f}x",
                f"{drafted['tokens_per_forward']:.2f}",
                f"{drafted['acceptance']:.0%}",
                f"{drafted['drafted_per_forward']:.2f}",
                f"{drafted['num_differing']}/{result['num_rollouts']}",
            )
            for result in report["drafting"]
            for drafted in [result["drafting"]]
        ],
    )


def _control_table(report: dict[str, Any]) -> Table:
    """What a drafter costs or saves, in pairs of runs: a row per history."""
    return figures_table(
        "with a drafter over without, in pairs",
        ("history", "ratio", "low", "high", "pairs", "drafted", "changed"),
        [
            (
                case,
                *(f"{result[name]:.2f}x" for name in ("ratio", "low", "high")),
                str(result["num_pairs"]),
                f"{result['drafted_per_forward']:.2f}",
                f"{result['num_differing']}/{result['num_rollouts']}",
            )
            for case, result in report["controls"].items()
        ],
    )


def _flip_table(report: dict[str, Any]) -> Table:
    return figures_table(
        "against one rollout at a time",
        ("dtype", "backend", "change", "differing", "flips per token"),
        [
            (
                result["dtype"],
                result["backend"],
                f"{result['change']} of {result['batch_size']}",
                f"{result['num_differing']} of {result['num_rollouts']}",
                f"{result['num_differing']} in {result['num_compared']:,}",
            )
            for result in report["flips"]
        ],
    )


def _millions(facts: dict[str, Any]) -> str:
    return f"{facts['num_parameters'] / 1e6:.2f} M"
