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

from benchmarks.common.tables import show
from treering.cli.display import WorkProgress
from treering.errors import InputError, TreeringError

SUBJECTS = {
    "tree": ("the tree step against separate flat sequences: time, memory, gradients", "--runs --only --full"),
    "images": ("completions after images against stock padded batches: time, bound, gradients", "--runs"),
    "distill": ("distilling a teacher on trees against flat sequences: time, memory, gradients", "--runs --only"),
    "compile": ("what numba compiles on a new installation: seconds by function", ""),
    "data": ("large files: memory and seconds of inspect, a second start, and sft to its first step", "--only"),
    "draft": (
        "recorded rollouts replayed with every drafter: tokens per verification step",
        "file --tokenizer --drafters --limit-tokens",
    ),
    "engine": ("decoding with drafts, without, and by model.generate", "--runs"),
    "pipe": ("every scheduling policy on worker processes against the simulator's prediction", "--runs"),
    "trl": ("TRL's trainers with shared prefixes against the stock ones", "--runs --only"),
    "loop": ("the plain RL loop, each part of Treering alone, and all together", "--runs"),
    "trl_rollouts": ("rollouts of TRL's trainer: drafts where they pay against none", "--runs --seeds"),
    "tinker": ("recipes of Tinker's cookbook on a server that trains, and its switches", "--only --models --folder"),
    "vllm": ("inside vLLM: drafts from history against its own drafters and none", "--runs --only --policy"),
    "real": (
        "a pretrained model: GRPO that learns by the plain loop and by Treering's, exactness, profiles",
        "--only --seeds --prompts --folder",
    ),
    "rehearsal": (
        "tokens that an update changes, by rate, and forward passes with rehearsals",
        "--only --seed --folder",
    ),
    "ranks": ("one and two ranks under torchrun: tokens per second, trees shared by cost", "--runs --only"),
    "faults": ("kills, damaged files and full disks: each run ends right or says why", "--cases --only --seed --full"),
}
"""What each measures, and its options."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

LOG_WIDTH = 160
"""Columns of a table that goes to a file, whose width rich takes for 80."""


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _limit(text: str) -> int | None:
    return int(text) or None


OPTIONS: dict[str, dict[str, Any]] = {
    "--runs": {"dest": "num_runs", "type": int, "metavar": "N", "help": "timed rounds; median wins"},
    "--only": {"type": _names, "metavar": "NAMES", "help": "some of its cases, such as star,toolbench; an unknown one "
               "is refused with those that there are"},
    "--full": {"dest": "sample_tokens", "action": "store_const", "const": None, "help": "all tasks of every set; takes "
               "hours"},
    "file": {"type": Path, "metavar": "FILE", "help": "recorded rollouts, JSON Lines, plain or .gz"},
    "--tokenizer": {"type": Path, "metavar": "DIR", "help": "renders messages to tokens"},
    "--drafters": {"type": _names, "metavar": "NAMES", "help": "some drafters, such as naive,treering"},
    "--limit-tokens": {"type": _limit, "metavar": "N", "help": "replay whole tasks of N sampled tokens; 60000, and 0 "
                       "replays everything"},
    "--policy": {"type": Path, "metavar": "DIR", "help": "a saved policy; without it one is trained"},
    "--seeds": {"dest": "num_seeds", "type": int, "metavar": "N", "help": "of the learning comparison, or 0"},
    "real --seeds": {"dest": "num_seeds", "type": int, "metavar": "N", "help": "of each task, and of exact; 3"},
    "--prompts": {"dest": "num_prompts", "type": int, "metavar": "N", "help": "of each task of GRPO; 32"},
    "--folder": {"type": Path, "metavar": "DIR", "help": "keeps each part that is done; runs/real"},
    "--models": {"type": _names, "metavar": "NAMES", "help": "tiny, smollm2, or both"},
    "tinker --folder": {"type": Path, "metavar": "DIR", "help": "keeps each row that is done; runs/tinker-recipes"},
    "--cases": {"dest": "num_cases", "type": int, "metavar": "N", "help": "how many faults; 300"},
    "faults --only": {"metavar": "KIND", "help": "this kind alone, as a note about a failure names it; or tinker"},
    "--seed": {"type": int, "metavar": "N", "help": "of the first case; the others have the next ones"},
    "rehearsal --folder": {"type": Path, "metavar": "DIR", "help": "keeps each part that is done; runs/rehearsal"},
    "rehearsal --seed": {"type": int, "metavar": "N", "help": "of sums, noise and adapters; 0"},
    "faults --full": {"action": "store_true", "help": "data sets of a million rows and lines of 100 MB"},
}  # fmt: skip
"""By flag, with the subject before it where it is that subject's own; one that is not given is not passed."""


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
    benchmark = import_module(f"benchmarks.{name}.bench")
    console = Console(stderr=True)
    console.print(benchmark.NOTE, soft_wrap=True)
    with WorkProgress(console) as progress:
        report = benchmark.measure(on_progress=progress.show, **options)
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if json_output:
        print(text)
    else:
        show(report, benchmark.TABLES, Console(width=None if sys.stdout.isatty() else LOG_WIDTH))
    # Last, where a log that is cut to its end still has them.
    for note in report.get("notes", ()):
        console.print(note, soft_wrap=True)
    return dict(report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure a claim on this machine.")
    subjects = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (text, flags) in SUBJECTS.items():
        own = subjects.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        own.add_argument("--json", action="store_true", default=False, help="print one JSON object, no tables")
        own.add_argument("--out", type=Path, metavar="FILE", default=None, help="write the JSON to this file too")
        for flag in flags.split():
            own.add_argument(flag, **OPTIONS.get(f"{name} {flag}", OPTIONS.get(flag, {})))
    return parser


if __name__ == "__main__":
    sys.exit(main())
