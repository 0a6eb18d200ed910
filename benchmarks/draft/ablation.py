"""Claim: of our drafter's policies and shapes, the calibrated tree yields the most at equal drafts.

`python -m benchmarks.draft.ablation FILE... --tokenizer DIR --out FILE` replays recorded rollouts with each policy as
tree and as chain: as shipped, and once more with a least acceptance at which it drafts no more tokens a step than the
tree by frequency as shipped. History is what tasks had in the last three epochs, where a file has as many, else in the
one before, else siblings that ran before. For rewards, replay the baselines `naive` and `naive_reward` by `python -m
benchmarks draft`.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import print_report
from benchmarks.draft.bench import LIMIT_TOKENS
from benchmarks.draft.drafters.ours import make_drafter, replay_rows
from benchmarks.draft.histories import plans
from benchmarks.draft.matched import NUM_REPLAYS, at_most
from benchmarks.draft.recording import read_recording
from benchmarks.draft.replay import Row, part
from treering.analysis.recording import Recorded
from treering.cli.display.progress import WorkProgress
from treering.errors import InputError, TreeringError
from treering.history.draft.settings import MIN_ACCEPTANCE, Shape

VARIANTS: tuple[tuple[str, Shape], ...] = (
    ("treering_frequency", "tree"),
    ("treering_frequency", "chain"),
    ("treering", "tree"),
    ("treering", "chain"),
)
"""Drafters and shapes; the first is what the others are compared with."""
RATES = ("tokens_per_step", "drafted_per_step", "precision")


def measure(name: str, recorded: Recorded, on_progress: OnProgress = silent) -> list[Row]:
    """Two rows a variant: `drafts` is shipped and equal; the second is missing where nothing drafts as little.

    Raises:
        InputError: no task has a second rollout.
    """
    found = plans(recorded)
    plan = found.get("recent") or found.get("earlier") or found.get("siblings")
    if plan is None:
        raise InputError(f"{name}: an ablation needs history, and no task has a second rollout: record more")
    rows: list[Row] = []
    for number, (drafter, shape) in enumerate(VARIANTS):
        tell = part(partial(on_progress, f"{name}: {drafter} {shape}"), number, 1, len(VARIANTS))
        tells = iter([part(tell, tried, 1, 1 + NUM_REPLAYS) for tried in range(1 + NUM_REPLAYS)])

        def replay(acceptance: float, drafter: str = drafter, shape: Shape = shape, tells=tells) -> Row:
            make = partial(make_drafter, drafter, plan, min_acceptance=acceptance, shape=shape)
            row = replay_rows(recorded, plan, make, next(tells))
            return {key: row[key] for key in RATES}

        shipped = replay(MIN_ACCEPTANCE)
        reference = rows[0] if rows else shipped
        equal = at_most(reference["drafted_per_step"], MIN_ACCEPTANCE, shipped, replay)
        names = {"recording": name, "history": plan.history, "drafter": drafter, "shape": shape}
        rows.append(names | {"drafts": "shipped"} | shipped)
        if equal is not None:
            ratio = {"ratio_to_frequency": equal["tokens_per_step"] / reference["tokens_per_step"]}
            rows.append(names | {"drafts": "equal"} | equal | ratio)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments, measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft.ablation", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded rollouts, JSON Lines")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="renders messages")
    parser.add_argument("--limit-tokens", type=int, default=LIMIT_TOKENS, metavar="N", help="each; 60000, 0 is all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes the rows as JSON")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    notes: list[str] = []
    try:
        with WorkProgress(Console(stderr=True)) as progress:
            for file in given.files:
                recorded, gaps = read_recording(file, given.tokenizer, given.limit_tokens or None)
                rows += measure(file.name.split(".")[0], recorded, progress.show)
                notes += gaps
    except TreeringError as error:
        sys.exit(f"ablation: {error}")
    print_report({"limit_tokens": given.limit_tokens, "rows": rows, "notes": notes}, given.out)


if __name__ == "__main__":
    main()
