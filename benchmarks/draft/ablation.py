"""Claim: of the ways to weigh what history holds, the calibrated one yields the most, tree or chain, at equal drafts.

`python -m benchmarks.draft.ablation FILE... --tokenizer DIR --out FILE` replays recorded rollouts with each policy as
tree and as chain: as shipped, and once more with a least acceptance at which it drafts no more tokens a step than the
tree of `treering_frequency` as shipped. History is what tasks had in the last three epochs, where a file has as many,
else in the one before, else siblings that ran before.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.timing import cpu_name, versions
from benchmarks.draft.drafters.ours import SHIPPED_ACCEPTANCE, make_drafter, replay_rows
from benchmarks.draft.histories import Plan, aged_plans, plans
from benchmarks.draft.matched import NUM_REPLAYS, Row, at_most
from benchmarks.draft.recording import Recording, read_recording
from benchmarks.draft.replay import OnDone, part
from treering.cli.progress import WorkProgress
from treering.errors import InputError, TreeringError
from treering.history.draft.settings import Shape

FREQUENCY, REWARD = "treering_frequency", "treering_reward"
POLICIES = {FREQUENCY: "frequency", REWARD: "reward", "treering_recency": "recency", "treering": "calibrated"}
"""Drafters in their order, each with the policy that it has."""
SHAPES: tuple[Shape, ...] = ("tree", "chain")
RATES = ("tokens_per_step", "drafted_per_step", "precision")
LIMIT_TOKENS = 60_000

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A recording with the history that it is replayed with."""

    name: str
    recording: Recording
    plan: Plan

    @property
    def has_rewards(self) -> bool:
        """Whether rewards are known, and tell the rollouts of some task apart."""
        tasks, rewards = self.recording.tasks, self.recording.rewards
        return not np.isnan(rewards).any() and any(np.ptp(rewards[tasks == task]) > 0 for task in np.unique(tasks))

    @property
    def variants(self) -> list[tuple[str, Shape]]:
        """Policies and shapes, the tree by frequency first."""
        return [(name, shape) for name in POLICIES if name != REWARD or self.has_rewards for shape in SHAPES]


def read(files: Sequence[Path], names: str | None, tokenizer: Path | None, limit_tokens: int) -> list[Case]:
    """The recordings, each with its history.

    Args:
        files: recorded rollouts.
        names: what they are called, with commas between; None is the files' names up to the first dot.
        tokenizer: folder that messages are rendered with.
        limit_tokens: of each, sampled tokens in whole tasks; 0 is all.

    Raises:
        InputError: a bad file or number, one without history, or names that do not tell files apart.
    """
    labels = [file.name.split(".")[0] for file in files] if names is None else names.split(",")
    if len(labels) != len(files) or len(set(labels)) < len(labels):
        raise InputError(
            f"recordings need a name each, no two alike, got {', '.join(labels)} for {len(files)} files: give "
            "--names A,B,... in their order"
        )
    if limit_tokens < 0:
        raise InputError(f"--limit-tokens must be at least 0, got {limit_tokens}: 0 replays everything")
    recordings = [read_recording(file, tokenizer, limit_tokens or None) for file in files]
    return [
        Case(name=name, recording=recording, plan=_plan(name, recording))
        for name, recording in zip(labels, recordings, strict=True)
    ]


def measure(cases: Sequence[Case], on_progress: OnProgress = lambda words, done: None) -> dict[str, Any]:
    """Rows of all recordings under "rows", and under "notes" what has none."""
    found: list[Row] = []
    notes: list[str] = []
    for number, case in enumerate(cases):
        rows = _replay_all(case, lambda words, done, number=number: on_progress(words, (number + done) / len(cases)))
        found += rows
        notes += _notes(case, rows)
    return {"rows": found, "notes": notes}


def _plan(name: str, recording: Recording) -> Plan:
    # Of one version alone, recency would be frequency.
    found, aged = plans(recording), aged_plans(recording)
    plan = aged[0] if aged else found.get("earlier") or found.get("siblings")
    if plan is None:
        raise InputError(f"{name}: an ablation needs history, and no task has a second rollout: record more")
    return plan


def _replay_all(case: Case, on_progress: OnProgress) -> list[Row]:
    """Two rows a variant, `drafts` being shipped and equal; the second is missing where nothing drafts as little."""
    rows: list[Row] = []
    for number, (name, shape) in enumerate(case.variants):
        tell = part(partial(on_progress, f"{case.name}: {name} {shape}"), number, 1, len(case.variants))
        replay = _replayer(case, name, shape, tell)
        shipped = replay(SHIPPED_ACCEPTANCE)
        reference = rows[0] if rows else shipped
        equal = at_most(reference["drafted_per_step"], SHIPPED_ACCEPTANCE, shipped, replay)
        names = {"recording": case.name, "history": case.plan.history, "drafter": name, "shape": shape}
        rows.append(names | {"drafts": "shipped"} | shipped)
        if equal is not None:
            ratio = {"ratio_to_frequency": equal["tokens_per_step"] / reference["tokens_per_step"]}
            rows.append(names | {"drafts": "equal"} | equal | ratio)
    return rows


def _replayer(case: Case, name: str, shape: Shape, on_done: OnDone) -> Callable[[float], Row]:
    """Replays a variant with one least acceptance after another, the shipped one and those of one search."""
    tells = iter([part(on_done, number, 1, 1 + NUM_REPLAYS) for number in range(1 + NUM_REPLAYS)])

    def replay(acceptance: float) -> Row:
        make = partial(make_drafter, name, None, case.plan, min_acceptance=acceptance, shape=shape)
        row = replay_rows(case.recording, case.plan, make, next(tells)).row()
        return {key: row[key] for key in RATES}

    return replay


def _notes(case: Case, rows: Sequence[Row]) -> list[str]:
    notes = list(case.recording.gaps)
    if not case.has_rewards:
        notes.append(f"rewards are unknown or equal within every task, so {REWARD} is left out")
    equal = {(row["drafter"], row["shape"]) for row in rows if row["drafts"] == "equal"}
    notes += [
        f"{name} {shape} drafts more than the tree of {FREQUENCY}, whatever its min_acceptance"
        for name, shape in case.variants
        if (name, shape) not in equal
    ]
    return [f"{case.name}: {note}" for note in notes]


def table(name: str, rows: Sequence[Row]) -> Table:
    """A recording's variants, a line each: as shipped, then at equal drafts."""
    found = Table(title=name, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    found.add_column("policy", no_wrap=True)
    found.add_column("shape", no_wrap=True)
    for column in ("per step", "drafted", "at equal drafts", "drafted", "ratio"):
        found.add_column(column, justify="right", no_wrap=True)
    for (drafter, shape), given in groupby(rows, key=lambda row: (row["drafter"], row["shape"])):
        found.add_row(POLICIES[drafter], shape, *(cell for row in given for cell in _cells(row)))
    return found


def _cells(row: Row) -> list[str]:
    ratio = [f"{row['ratio_to_frequency']:.3f}"] if "ratio_to_frequency" in row else []
    return [f"{row['tokens_per_step']:.2f}", f"{row['drafted_per_step']:.2f}", *ratio]


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments, measures, shows and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft.ablation", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded rollouts, JSON Lines")
    parser.add_argument("--names", metavar="A,B", help="what the files are called, in their order")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="renders messages")
    parser.add_argument("--limit-tokens", type=int, default=LIMIT_TOKENS, metavar="N", help="each; 60000, 0 is all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes the rows as JSON")
    try:
        _run(parser.parse_args(arguments))
    except TreeringError as error:
        sys.exit(f"draft_ablation: {error}")


def _run(given: argparse.Namespace) -> None:
    if given.out is not None and not given.out.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {given.out}: create {given.out.parent} first")
    cases = read(given.files, given.names, given.tokenizer, given.limit_tokens)
    with WorkProgress(Console(stderr=True)) as progress:
        report = measure(cases, progress.tell)
    for name, rows in groupby(report["rows"], key=lambda row: f"{row['recording']}, history: {row['history']}"):
        Console().print(table(name, list(rows)))
    for note in report["notes"]:
        print(note, file=sys.stderr)
    if given.out is not None:
        facts = {"machine": cpu_name(), "versions": versions(), "limit_tokens": given.limit_tokens}
        given.out.write_text(json.dumps(facts | report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
