"""`treering bench`: a claim measured on this machine, with its baselines beside it.

Knows where figures are written and who shows them. What is measured stands in the repository's `benchmarks`, which the
installed package does not contain; how a report looks is known to the file of its name beside this one.
"""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rich.console import Console

from treering.cli import bench_draft, bench_engine, bench_loop, bench_pipe, bench_tree
from treering.cli.bench_progress import BenchProgress
from treering.errors import InputError, UnsupportedError

CHECKOUT = Path(__file__).resolve().parents[3]

Name = Literal["tree", "draft", "engine", "pipe", "loop"]
_VIEWS: dict[Name, ModuleType] = {
    "tree": bench_tree,
    "draft": bench_draft,
    "engine": bench_engine,
    "pipe": bench_pipe,
    "loop": bench_loop,
}
_OWNERS: dict[str, tuple[Name, ...]] = {
    "FILE": ("draft",),
    "--runs": ("tree", "engine", "pipe", "loop"),
    "--only": ("tree",),
    "--full": ("tree",),
    "--tokenizer": ("tree", "draft"),
    "--drafters": ("draft",),
    "--max-draft": ("draft",),
    "--limit-tokens": ("draft",),
    "--siblings": ("draft",),
    "--cost": ("draft",),
    "--batch": ("draft",),
    "--match-drafts": ("draft",),
}
"""What takes each option that not all take."""


def run(
    name: Name,
    json_output: bool,
    out: Path | None,
    runs: int | None = None,
    only: str | None = None,
    full: bool = False,
    tokenizer: Path | None = None,
    file: Path | None = None,
    drafters: str | None = None,
    max_draft: int | None = None,
    limit_tokens: int | None = None,
    siblings: Literal["before", "others"] | None = None,
    cost: Path | None = None,
    batch: int | None = None,
    match_drafts: float | None = None,
) -> None:
    """Measures and prints one benchmark as JSON or as tables, and writes the JSON to `out` too.

    Args:
        name: which one.
        json_output: one JSON object on stdout in place of the tables.
        out: file for the JSON.
        runs: all but draft: timed rounds; None is the benchmark's own number.
        only: tree: names of cases and sets with commas between them; None is all.
        full: tree: all tasks of every set in place of a sample.
        tokenizer: tree: folder of another tokenizer than the real-data folder's; draft: to render messages with.
        file: draft: recorded rollouts.
        drafters: draft: names with commas between them; None is all but the ablation's.
        max_draft: draft: tokens per draft at most.
        limit_tokens: draft: sampled tokens that are replayed; 0 is all, None the benchmark's own number.
        siblings: draft: whether a sample sees those of its task that ran before it, or all others.
        cost: draft: file of what passes cost.
        batch: draft: rows that the speedup is predicted for.
        match_drafts: draft: drafted tokens per step that `treering` may have; None is what Arctic's best row has.

    Raises:
        InputError: an option of another benchmark, `runs` below one, an `out` whose folder does not exist, or what the
            benchmark refuses.
        UnsupportedError: no checkout of the repository around the package.
    """
    _check_arguments(runs, out)
    _check_owners(
        name,
        {"FILE": file, "--runs": runs, "--only": only, "--full": full, "--tokenizer": tokenizer, "--cost": cost}
        | {"--drafters": drafters, "--max-draft": max_draft, "--limit-tokens": limit_tokens, "--siblings": siblings}
        | {"--batch": batch, "--match-drafts": match_drafts},
    )
    given: dict[str, Any] = {"num_runs": runs, "only": _names(only), "tokenizer": tokenizer, "file": file}
    given |= {"drafters": _names(drafters), "max_draft": max_draft, "siblings": siblings, "cost": cost, "batch": batch}
    given |= {"match_drafts": match_drafts}
    options = {option: value for option, value in given.items() if value is not None}
    options |= {"sample_tokens": None} if full else {}
    options |= {} if limit_tokens is None else {"limit_tokens": limit_tokens or None}
    _measure(name, options, json_output, out)


def _measure(name: Name, options: dict[str, Any], json_output: bool, out: Path | None) -> None:
    view, benchmark = _VIEWS[name], load_benchmark(name)
    console = Console(stderr=True)
    if view.NOTE is None:
        options = options | {"on_note": partial(console.print, soft_wrap=True)}
    else:
        console.print(view.NOTE, soft_wrap=True)
    with BenchProgress(console) as progress:
        report = benchmark.measure(on_progress=progress.tell, **options)
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


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _check_owners(name: Name, given: dict[str, Any]) -> None:
    """Refuses what belongs to another benchmark, and the absence of what this one needs."""
    for option, value in given.items():
        if value is not None and value is not False and name not in _OWNERS[option]:
            owners = " and ".join(f"`treering bench {owner}`" for owner in _OWNERS[option])
            raise InputError(f"{option} belongs to {owners}, got it for {name}: leave it out")
    if name == "draft" and given["FILE"] is None:
        raise InputError("`treering bench draft FILE` replays recorded rollouts, got no file: name a trajectory file")


def _check_arguments(runs: int | None, out: Path | None) -> None:
    if runs is not None and runs < 1:
        raise InputError(f"--runs must be at least 1, got {runs}: 5 or more give a median worth quoting")
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {out}: create {out.parent} first")
