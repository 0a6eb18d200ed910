"""`python -m benchmarks NAME`: measure a claim on this machine, against its best baseline.

Run it in a checkout of the repository; the installed package has no benchmarks.
"""

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from treering.cli.display.progress import WorkProgress
from treering.errors import InputError, TreeringError

SUBJECTS = {
    "tree": "the tree step against separate flat sequences: time, memory, gradients",
    "pictures": "completions after pictures against stock padded batches: time, bound, gradients",
    "distill": "distilling a teacher on trees against flat sequences: time, memory, gradients",
    "compile": "what numba compiles on a new installation: seconds by function",
    "draft": "recorded rollouts replayed with every drafter: tokens per verification step",
    "engine": "decoding with drafts, without, and by model.generate",
    "pipe": "every scheduling policy on worker processes against the simulator's prediction",
    "trl": "TRL's trainers with shared prefixes against the stock ones, and its own prefix sharing",
    "loop": "the plain RL loop, each part of Treering alone, and all together",
    "trl_rollouts": "rollouts of TRL's trainer: drafts where they pay against none, by batch and epoch",
    "vllm": "inside vLLM: drafts from history against its own drafters and none",
    "ranks": "one and two ranks under torchrun: tokens per second, and trees shared by cost against equal counts",
    "weights": "handing weights to rollout workers: shared memory against Ray's object store, by size",
    "faults": "kills, damaged files and full disks: each run ends right or says why",
}
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    """Measures one subject; returns the exit code: 0, 1 if the report has failures, or 2 for bad input."""
    # torch reads these when it starts its threads: spinning ones slow every process of a shared machine down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    options = vars(_parser().parse_args(arguments))
    try:
        report = _run(options.pop("name"), options.pop("json"), options.pop("out"), options)
    except TreeringError as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_FAILED if report.get("failures") else 0


def _run(name: str, json_output: bool, out: Path | None, options: dict[str, object]) -> dict[str, Any]:
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {out}: create {out.parent} first")
    benchmark, view = (import_module(f"benchmarks.{name}.{part}") for part in ("bench", "view"))
    console = Console(stderr=True)
    console.print(view.NOTE, soft_wrap=True)
    with WorkProgress(console) as progress:
        report = benchmark.measure(on_progress=progress.show, **options)
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if json_output:
        print(text)
    else:
        view.show(report, Console())
    # Last, where a log that is cut to its end still has them.
    for note in report.get("notes", ()):
        console.print(note, soft_wrap=True)
    return dict(report)


def _parser() -> argparse.ArgumentParser:
    """Options have the names of the parameters of `measure`; one that is not given is not passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure a claim on this machine.")
    subjects = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    parsers = {
        name: subjects.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        for name, text in SUBJECTS.items()
    }
    for each in parsers.values():
        each.add_argument("--json", action="store_true", default=False, help="print one JSON object, no tables")
        each.add_argument("--out", type=Path, metavar="FILE", default=None, help="write the JSON to this file too")
    for name in (
        "tree",
        "pictures",
        "distill",
        "engine",
        "pipe",
        "trl",
        "loop",
        "trl_rollouts",
        "vllm",
        "ranks",
        "weights",
    ):
        parsers[name].add_argument("--runs", dest="num_runs", type=int, metavar="N", help="timed rounds; median wins")
    tree, draft, faults = parsers["tree"], parsers["draft"], parsers["faults"]
    faults.add_argument("--cases", dest="num_cases", type=int, metavar="N", help="how many faults; 240")
    faults.add_argument("--only", metavar="KIND", help="this kind alone, as a note about a failure names it")
    faults.add_argument("--seed", type=int, metavar="N", help="of the first case; the others have the next ones")
    parsers["trl_rollouts"].add_argument(
        "--seeds", dest="num_seeds", type=int, metavar="N", help="of the learning comparison; 0 leaves it out"
    )
    parsers["trl"].add_argument("--only", type=_names, metavar="NAMES", help="cases and sets, such as group_260")
    tree.add_argument("--only", type=_names, metavar="NAMES", help="cases and sets, such as star,toolbench")
    parsers["vllm"].add_argument("--only", type=_names, metavar="NAMES", help="methods, such as none,history")
    parsers["vllm"].add_argument("--policy", type=Path, metavar="DIR", help="a saved policy; without it one is trained")
    parsers["distill"].add_argument("--only", type=_names, metavar="NAMES", help="star, tau, toolbench, math")
    parsers["ranks"].add_argument("--only", type=_names, metavar="NAMES", help="toolbench, hotpotqa, math, text")
    tree.add_argument(
        "--full", dest="sample_tokens", action="store_const", const=None, help="all tasks of every set; takes hours"
    )
    draft.add_argument("file", type=Path, metavar="FILE", help="recorded rollouts, JSON Lines, plain or .gz")
    draft.add_argument("--tokenizer", type=Path, metavar="DIR", help="renders messages to tokens")
    draft.add_argument("--drafters", type=_names, metavar="NAMES", help="some drafters, such as naive,treering")
    draft.add_argument(
        "--limit-tokens",
        type=lambda text: int(text) or None,
        metavar="N",
        help="replay whole tasks of N sampled tokens; 60000, and 0 replays everything",
    )
    return parser


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
