"""`treering bench`: a claim measured on this machine, with its baselines beside it.

Knows how figures are shown and where they are written. What is measured stands in the repository's `benchmarks`, which
the installed package does not contain.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from treering.errors import InputError, UnsupportedError

DEFAULT_RUNS = 5
CHECKOUT = Path(__file__).resolve().parents[3]


def run(name: Literal["tree"], json_output: bool, out: Path | None, runs: int = DEFAULT_RUNS) -> None:
    """Measures and prints one benchmark as JSON or as a table, and writes the JSON to `out` too.

    Raises:
        InputError: `runs` below one, or an `out` whose folder does not exist.
        UnsupportedError: no checkout of the repository around the package.
    """
    _check_arguments(runs, out)
    benchmark = load_benchmark(name)
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        job = progress.add_task("preparing", total=None)
        report = benchmark.measure(num_runs=runs, on_progress=lambda words: progress.update(job, description=words))
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if not any(case["peers"] for case in report["cases"]):
        console.print(benchmark.HINT)
    if json_output:
        print(text)
        return
    _show(report, Console())


def load_benchmark(name: str, checkout: Path = CHECKOUT) -> ModuleType:
    """The module `benchmarks.NAME` of the checkout that this package runs from.

    Raises:
        UnsupportedError: the package was installed without its repository.
    """
    if not (checkout / "benchmarks" / f"{name}.py").is_file():
        raise UnsupportedError(
            f"benchmarks come with the repository and not with the installed package, and {checkout} is no checkout: "
            "clone the repository and run `make bench` in it"
        )
    if str(checkout) not in sys.path:
        # First, so that no other project's `benchmarks` is taken for ours.
        sys.path.insert(0, str(checkout))
    return import_module(f"benchmarks.{name}")


def as_table(report: dict[str, Any]) -> Table:
    """The cases of a report, a row each."""
    facts = report["environment"]
    title = f"one forward and backward on {facts['cpu']}, {facts['threads']} thread, median of {facts['runs']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for name in ("flat tokens", "unique", "FLOP bound", "baseline s", "tree s", "speedup", "of bound", "grad error"):
        table.add_column(name, justify="right")
    for case in report["cases"]:
        table.add_row(*_cells(case))
    return table


def _check_arguments(runs: int, out: Path | None) -> None:
    if runs < 1:
        raise InputError(f"--runs must be at least 1, got {runs}: 5 or more give a median worth quoting")
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {out}: create {out.parent} first")


def _cells(case: dict[str, Any]) -> list[str]:
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


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(as_table(report))
    for case in report["cases"]:
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in case["baselines"].items())
        console.print(f"{case['case']}: {seconds}; the baseline is {case['baseline']}", soft_wrap=True)
        for name, peer in case["peers"].items():
            console.print(f"  {name}: {peer['speedup']:.2f}x in {peer['seconds']:.3f} s", soft_wrap=True)
