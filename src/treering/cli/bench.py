"""`treering bench`: a claim measured on this machine, with its baselines beside it.

Knows where figures are written and who shows them. What is measured stands in the repository's `benchmarks`, which the
installed package does not contain; how a report looks is known to the file of its name beside this one.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rich.console import Console

from treering.cli import bench_engine, bench_tree
from treering.cli.bench_progress import BenchProgress
from treering.errors import InputError, UnsupportedError

CHECKOUT = Path(__file__).resolve().parents[3]

Name = Literal["tree", "engine"]
_VIEWS = {"tree": bench_tree, "engine": bench_engine}


def run(
    name: Name,
    json_output: bool,
    out: Path | None,
    runs: int | None = None,
    only: str | None = None,
    full: bool = False,
    tokenizer: Path | None = None,
) -> None:
    """Measures and prints one benchmark as JSON or as tables, and writes the JSON to `out` too.

    Args:
        name: which one.
        json_output: one JSON object on stdout in place of the tables.
        out: file for the JSON.
        runs: timed rounds; None is the benchmark's own number.
        only: tree: names of cases and sets with commas between them; None is all.
        full: tree: all tasks of every set in place of a sample.
        tokenizer: tree: folder of another tokenizer than the real-data folder's.

    Raises:
        InputError: `runs` below one, an `out` whose folder does not exist, or what the benchmark refuses.
        UnsupportedError: no checkout of the repository around the package.
    """
    _check_arguments(runs, out)
    given: dict[str, Any] = {} if runs is None else {"num_runs": runs}
    given |= _tree_options(name, only, full, tokenizer)
    view, benchmark = _VIEWS[name], load_benchmark(name)
    console = Console(stderr=True)
    if view.NOTE:
        console.print(view.NOTE, soft_wrap=True)
    with BenchProgress(console) as progress:
        report = benchmark.measure(on_progress=progress.tell, **given)
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


def _tree_options(name: Name, only: str | None, full: bool, tokenizer: Path | None) -> dict[str, Any]:
    """The options that only the tree benchmark has, in its own words."""
    given = {"--only": only, "--full": full, "--tokenizer": tokenizer}
    if name != "tree":
        for option, value in given.items():
            if value:
                raise InputError(f"{option} belongs to `treering bench tree`, got it for {name}: leave it out")
        return {}
    options: dict[str, Any] = {}
    if only is not None:
        options["only"] = [part.strip() for part in only.split(",")]
    if full:
        options["sample_tokens"] = None
    if tokenizer is not None:
        options["tokenizer"] = tokenizer
    return options


def _check_arguments(runs: int | None, out: Path | None) -> None:
    if runs is not None and runs < 1:
        raise InputError(f"--runs must be at least 1, got {runs}: 5 or more give a median worth quoting")
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {out}: create {out.parent} first")
