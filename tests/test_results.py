"""The figures of README, docs/results.md and docs/tinker.md equal those of the reports in benchmarks/results."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REPORTS = {
    "make demo": ("demo",),
    "python -m benchmarks distill": ("distill",),
    "python -m benchmarks draft": ("draft_toolbench_dfsdt", "draft_qwen25math_maj8"),
    "python -m benchmarks engine": ("engine",),
    "python -m benchmarks loop": ("loop",),
    "python -m benchmarks images": ("images",),
    "python -m benchmarks real": ("real",),
    "python -m benchmarks rehearsal": ("rehearsal",),
    "python -m benchmarks tree": ("tree", "tree_sets", "tree_partitions"),
    "python -m benchmarks vllm": ("vllm",),
    "treering simulate": ("simulate",),
}
COMMAND = re.compile(rf"\(`({'|'.join(REPORTS)})`")


def rows(document: str) -> Iterator[tuple[str, str]]:
    """Yield the command and the other columns of each row of a table of five columns."""
    command = ""
    for line in (ROOT / document).read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split("|")
        found = COMMAND.search(cells[0])
        command = found[1] if found else command
        if len(cells) == 5 and (found or "(same)" in cells[0]):
            yield command, " ".join(cells[1:])


def numbers(report: Any, parent: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield each number of a report with its path, without positions in lists."""
    if isinstance(report, dict):
        for name, value in report.items():
            yield from numbers(value, (*parent, name))
    elif isinstance(report, list):
        for value in report:
            yield from numbers(value, parent)
    elif isinstance(report, int | float):
        yield parent, float(report)


def known(command: str) -> list[float]:
    """Return the numbers a row may show: those of its reports, bytes in MB, and quotients of two at one path."""
    beside = defaultdict(list)
    for name in REPORTS[command]:
        report = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for path, number in numbers(report):
            beside[path[:-1] if path[-2:-1] == ("seconds",) else path].append(number)
    found = [number for group in beside.values() for number in group]
    quotients = [a / b for group in beside.values() if len(group) < 60 for a, b in permutations(group, 2) if b]
    return [*found, *(number / 1e6 for number in found), *quotients]


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_the_figures_of_a_document_are_in_the_reports(document: str) -> None:
    values = {command: known(command) for command in REPORTS}
    checked = 0
    for command, text in rows(document):
        for figure in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text):
            plain = figure.replace(",", "")
            digits = len(plain.partition(".")[2])
            assert any(f"{value:.{digits}f}" == plain for value in values[command]), f"{figure} of `{command}`: {text}"
            checked += 1
    assert checked > 20


def test_the_figures_of_tinkers_recipes_are_in_their_report() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "tinker.json").read_text(encoding="utf-8"))
    values = [number for _, number in numbers(report)]
    text = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8").partition("## Recipes")[2].partition("\n## ")[0]
    found = [line.split("|", 2)[2] for line in text.splitlines() if re.match(r"\| (`\w|on|off)", line)]
    for row in found:
        for figure in re.findall(r"-?\d[\d,]*(?:\.\d+)?", row):
            digits = len(figure.partition(".")[2])
            assert any(f"{value:.{digits}f}" == figure.replace(",", "") for value in values), f"{figure} in {row}"
    assert len(found) == len(report["recipes"]) + len(report["switches"])
