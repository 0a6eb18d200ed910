"""`treering bench`: a claim measured on this machine, with its baselines beside it.

Knows where figures are written and who shows them. What is measured stands in the repository's `benchmarks`, which the
installed package does not contain; how a report looks is known to the file of its name beside this one.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from treering.cli import bench_engine, bench_tree
from treering.errors import InputError, UnsupportedError

DEFAULT_RUNS = 5
CHECKOUT = Path(__file__).resolve().parents[3]

Name = Literal["tree", "engine"]
_VIEWS = {"tree": bench_tree, "engine": bench_engine}


def run(name: Name, json_output: bool, out: Path | None, runs: int = DEFAULT_RUNS) -> None:
    """Measures and prints one benchmark as JSON or as tables, and writes the JSON to `out` too.

    Raises:
        InputError: `runs` below one, or an `out` whose folder does not exist.
        UnsupportedError: no checkout of the repository around the package.
    """
    _check_arguments(runs, out)
    view, benchmark = _VIEWS[name], load_benchmark(name)
    console = Console(stderr=True)
    if view.NOTE:
        console.print(view.NOTE, soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        job = progress.add_task("preparing", total=None)
        report = benchmark.measure(num_runs=runs, on_progress=lambda words: progress.update(job, description=words))
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    for hint in view.hints(report, benchmark):
        console.print(hint, soft_wrap=True)
    if json_output:
        print(text)
        return
    view.show(report, Console())


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


def _check_arguments(runs: int, out: Path | None) -> None:
    if runs < 1:
        raise InputError(f"--runs must be at least 1, got {runs}: 5 or more give a median worth quoting")
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {out}: create {out.parent} first")
