"""Claim: a drafter's prior is worth what it brings on rollouts that it was not fitted to, which is measured here.

`python -m benchmarks.draft.prior FILE... --tokenizer DIR --evaluate` replays recorded rollouts with the drafter as
shipped, which knows nothing of features, with weights fitted to all files, and with weights fitted to files of other
families. `--out` writes those fitted to all as a state for `Drafter.load_state`. What is fitted to a recording is made
of it: where its terms forbid to ship that, measure and do not ship.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.timing import cpu_name, versions
from benchmarks.draft.drafters.ours import make_drafter, replay_rows
from benchmarks.draft.histories import Plan, plans
from benchmarks.draft.recording import Recording, read_recording
from treering import Drafter, HistoryStore
from treering.arrays import Float64Array
from treering.errors import InputError, TreeringError
from treering.history.draft.reliability import as_bins, calibration_error
from treering.history.features import NUM_GENERAL, NUM_VOTES

Row = dict[str, Any]

NUM_FITTED = NUM_VOTES + NUM_GENERAL
"""Weights that a prior has; those of single tokens mean nothing with another tokenizer."""
MIN_ACCEPTANCE = 0.05
"""Lower than the drafter's own while it is taught, so that poorer tokens are tried as well."""
LIMIT_TOKENS = 60_000
EARLY = (500, 2000)
"""Calibration is told for the first so many tokens that were tried, and for all."""
RESULT = Path("benchmarks/results/draft_prior.json")


def lesson(recording: Recording) -> Float64Array:
    """float64 [votes + general features]: the weights of a drafter as shipped that replayed a recording.

    Raises:
        InputError: no rollout has history.
    """
    plan = _plan(recording)
    made: list[Drafter] = []

    def make(store: HistoryStore) -> Drafter:
        drafter = Drafter(store, min_acceptance=MIN_ACCEPTANCE)
        made.append(drafter)
        return drafter

    replay_rows(recording, plan, make, lambda done: None)
    return made[-1].state()["weights"][:NUM_FITTED]


def fit(lessons: Mapping[str, Float64Array], leave_out: str | None = None) -> Float64Array:
    """The mean of the lessons of other families than `leave_out`'s: each recording counts the same, whatever its size.

    A weight that few recordings used is drawn towards 0 by those that did not, which is all the regularisation.

    Raises:
        InputError: no lesson is left.

    Example: lessons [1, 3] of `math_a` and [3, 5] of `agent_b` give [2, 4], and [3, 5] without `math_b`.
    """
    kept = [weights for name, weights in sorted(lessons.items()) if leave_out is None or not is_kin(name, leave_out)]
    if not kept:
        raise InputError(f"no recording is left to fit to without the family of {leave_out!r}: add files of others")
    mean: Float64Array = np.mean(kept, axis=0)
    return mean


def is_kin(name: str, other: str) -> bool:
    """Whether two recordings are of one family, by their names up to the first underscore.

    Example: `tot_game24_bfs` and `tot_text` are, `tau_airline` is not.
    """
    return name.split("_")[0] == other.split("_")[0]


def evaluate(recordings: Mapping[str, Recording], lessons: Mapping[str, Float64Array]) -> list[Row]:
    """A row per recording and prior: `shipped`, `fitted` to all, or `left_out`, fitted to other families."""
    rows: list[Row] = []
    for name, recording in recordings.items():
        priors = {"shipped": None, "fitted": fit(lessons), "left_out": fit(lessons, leave_out=name)}
        rows += [{"file": name, "prior": key} | replay(recording, weights) for key, weights in priors.items()]
    return rows


def replay(recording: Recording, weights: Float64Array | None) -> Row:
    """Rates and calibration errors of a replay that begins with these weights; None are those as shipped."""
    plan = _plan(recording)
    made: list[Drafter] = []
    early: dict[int, float] = {}

    def make(store: HistoryStore) -> Drafter:
        drafter = make_drafter("treering", None, plan, store)
        if weights is not None:
            drafter.load_state(_state(drafter, weights))
        made.append(drafter)
        return drafter

    def watch(done: float) -> None:
        if len(early) == len(EARLY):
            return
        table = made[-1].state()["reliability"]
        for size in EARLY:
            if size not in early and table[:, 0].sum() >= size:
                early[size] = calibration_error(as_bins(table))

    row = replay_rows(recording, plan, make, watch).row()
    errors = {f"calibration_error_{size}": early.get(size) for size in EARLY}
    kept = {key: row[key] for key in ("tokens_per_step", "drafted_per_step", "precision")}
    return kept | errors | {"calibration_error": calibration_error(made[-1].reliability())}


def read(files: Sequence[Path], tokenizer: Path | None, limit_tokens: int) -> dict[str, Recording]:
    """Recordings by the names of their files without endings.

    Raises:
        InputError: a bad file, or two of one name.
    """
    names = [file.name.split(".")[0] for file in files]
    if len(set(names)) < len(names):
        raise InputError(f"recordings are told apart by file name, got {', '.join(names)}: rename one")
    return {name: read_recording(file, tokenizer, limit_tokens) for name, file in zip(names, files, strict=True)}


def _plan(recording: Recording) -> Plan:
    found = plans(recording)
    plan = found.get("siblings") or found.get("earlier")
    if plan is None:
        raise InputError("a prior is fitted to rollouts that have history, and no task has a second one: record more")
    return plan


def _state(drafter: Drafter, weights: Float64Array) -> dict[str, Float64Array]:
    state = drafter.state()
    state["weights"][:NUM_FITTED] = weights
    return state


def _print(rows: Sequence[Row]) -> None:
    """A line per row; the errors are those of all tokens that were tried, and of the first ones."""
    names = ("prior", "per step", "drafted", "error", *(f"first {size}" for size in EARLY))
    print(f"{'recording':28}" + "".join(f"{name:>11}" for name in names))
    for row in rows:
        errors = [row["calibration_error"], *(row[f"calibration_error_{size}"] for size in EARLY)]
        told = "".join(f"{'-' if error is None else format(error, '.3f'):>11}" for error in errors)
        rates = f"{row['tokens_per_step']:11.3f}{row['drafted_per_step']:11.2f}"
        print(f"{row['file']:28}{row['prior']:>11}{rates}{told}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments, fits and evaluates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft.prior", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded rollouts, JSON Lines")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="renders messages")
    parser.add_argument("--leave-out", metavar="NAME", help="files of its family are not even read")
    parser.add_argument("--limit-tokens", type=int, default=LIMIT_TOKENS, metavar="N", help="of each (default 60,000)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes the fitted prior, a Drafter's state, .npz")
    parser.add_argument("--evaluate", action="store_true", help="replays every recording with three priors")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help=f"of --evaluate (default {RESULT})")
    given = parser.parse_args(arguments)
    try:
        _run(given)
    except TreeringError as error:
        sys.exit(f"draft_prior: {error}")


def _run(given: argparse.Namespace) -> None:
    left = given.leave_out
    files = [file for file in given.files if left is None or not is_kin(file.name.split(".")[0], left)]
    recordings = read(files, given.tokenizer, given.limit_tokens)
    lessons = {name: lesson(recording) for name, recording in recordings.items()}
    if given.out is not None:
        fitted: Any = _state(Drafter(HistoryStore()), fit(lessons))
        np.savez(given.out, **fitted)
    if given.evaluate:
        rows = evaluate(recordings, lessons)
        _print(rows)
        facts = {"versions": versions(), "cpu": cpu_name(), "limit_tokens": given.limit_tokens}
        given.json.write_text(json.dumps({"rows": rows, "environment": facts}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
