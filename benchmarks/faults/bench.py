"""Claim: whatever happens to a run's process, files and disk, nothing is lost in silence.

`python -m benchmarks faults` kills runs of `treering train`, damages their folders between two starts, fills and locks
their disks, starts two in one folder, kills the processes of an environment, and gives them bad inputs: a model folder
that brings code, a record of a cut turn, a dataset with a missing part, files that are huge or change while they are
read. It kills servers, and those of Tinker's protocol while they train, with their clients. Each case ends with the
weights of an undisturbed run or the figures of the whole file, with these and a warning that counts what was lost or
left out, or with one clear line and an exit code that is not 0. All else is a failure, listed with the seed that
repeats it. Every process is real; runs are forked from one that has imported everything.
"""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.common.progress import OnProgress, silent
from benchmarks.faults.cases import DAMAGED, DISKS, KILLS, LIMITS, OTHERS, Case, Kind, can_mount
from benchmarks.faults.datasets import DATASETS, SET_DISKS
from benchmarks.faults.episodes import EPISODES
from benchmarks.faults.inputs import INPUTS
from benchmarks.faults.judge import ENDINGS, Verdict, failure
from benchmarks.faults.processes import REWARDED, SIGNALLED
from benchmarks.faults.runs import Server
from benchmarks.faults.serving import SERVERS
from benchmarks.faults.task import Task, arguments, make_task
from benchmarks.faults.tinker import HAS_TINKER, TINKER
from treering.errors import InputError
from treering.extras import require

NOTE = "about six minutes; `--cases 100` takes about two"
TABLES = {
    "kinds": ("kind", "num_cases", "same weights", "counted warning", "one line", "failure"),
}

NUM_STEPS = 6
NUM_CASES = 300
_SHARES: Sequence[tuple[Sequence[Kind], float]] = (
    *((KILLS, 0.12), (SIGNALLED, 0.08), (REWARDED, 0.03)),
    *((EPISODES, 0.03), (LIMITS, 0.05), (DISKS, 0.08), (OTHERS, 0.02), (INPUTS, 0.03)),
    *((DATASETS, 0.02), (SET_DISKS, 0.01), (SERVERS, 0.01), (TINKER, 0.03)),
)
"""Share of the cases that each list has; the rest are damaged files."""
_ROWS = (
    *(KILLS, SIGNALLED, REWARDED, EPISODES, DAMAGED, LIMITS, DISKS, OTHERS, INPUTS, DATASETS),
    *(SET_DISKS, SERVERS, TINKER),
)
"""The order of the report."""


def measure(
    *,
    num_cases: int = NUM_CASES,
    seed: int = 0,
    only: str | None = None,
    full: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """The report, ready for JSON: "kinds" with the number of each ending, "failures" with their seeds, "notes".

    Args:
        num_cases: how many; below about 200 not every damage of every file is among them.
        seed: of the first case; the others have the following ones.
        full: whether data sets have a million rows and lines of 100 MB, a fiftieth of which they have otherwise.
        only: a kind as the notes name it, a row of the table, or "tinker" for the rows of its protocol; every case is
            then of it, and with its seed a kind repeats a failure.
        on_progress: called with a line and the share that is done.

    Raises:
        InputError: fewer than one case, or an unknown kind.
        MissingExtraError: a kind of Tinker's protocol without its client.
    """
    if num_cases < 1:
        raise InputError(f"a fault run has at least one case, got {num_cases}; ask for more")
    if only is not None and _named(only)[0] in TINKER:
        require(f"--only {only!r}", "tinker", "peft")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, Server() as server:
        folder = Path(name)
        has_disks = can_mount(folder / "disk")
        on_progress("the undisturbed run", 0.0)
        task = make_task(server, folder, NUM_STEPS)
        run_s = _seconds(server, task, folder)
        verdicts: list[tuple[Kind, int, Verdict]] = []
        for number, kind in enumerate(chosen(num_cases, seed, only=only, has_disks=has_disks)):
            on_progress(f"case {number + 1} of {num_cases}: {kind}", number / num_cases)
            verdicts.append(
                (kind, seed + number, _happen(kind, server, task, folder, seed + number, run_s, is_full=full))
            )
    return _report(verdicts, num_cases, seed, time.monotonic() - started, has_disks=has_disks)


def chosen(num_cases: int, seed: int, *, only: str | None = None, has_disks: bool = True) -> list[Kind]:
    """The kind of each case, in a random order; every kind of damage once before one comes twice."""
    if only is not None:
        kinds = _named(only)
        return [kinds[i % len(kinds)] for i in range(num_cases)]
    found: list[Kind] = []
    random = Random(seed)
    for kinds, share in _SHARES:
        if (has_disks or kinds not in (DISKS, SET_DISKS)) and (HAS_TINKER or kinds is not TINKER):
            number, mixed = max(1, round(share * num_cases)), random.sample(kinds, len(kinds))
            found += [mixed[i % len(mixed)] for i in range(number)]
    while len(found) < num_cases:
        found += random.sample(DAMAGED, len(DAMAGED))
    found = found[:num_cases]
    random.shuffle(found)
    return found


def _named(name: str) -> list[Kind]:
    kinds = [kind for each in (*(kinds for kinds, _ in _SHARES), DAMAGED) for kind in each]
    found = [kind for kind in kinds if name in (kind.name, str(kind)) or (name == "tinker" and kind in TINKER)]
    if not found:
        raise InputError(f"--only names a kind of fault, got {name!r}; there are {'; '.join(map(str, kinds))}")
    return found


def _happen(kind: Kind, server: Server, task: Task, folder: Path, seed: int, run_s: float, *, is_full: bool) -> Verdict:
    case_folder = folder / f"case-{seed}"
    case_folder.mkdir()
    try:
        return kind.happen(
            Case(server=server, task=task, folder=case_folder, random=Random(seed), run_s=run_s, is_full=is_full)
        )
    except (OSError, ValueError, LookupError) as error:
        return failure(f"the case itself: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(case_folder, ignore_errors=True)


def _seconds(server: Server, task: Task, folder: Path) -> float:
    found = []
    for number in range(3):
        started = time.monotonic()
        server.start(arguments(task, folder / f"timed-{number}")).end()
        found.append(time.monotonic() - started)
    return median(found)


def _report(
    verdicts: Sequence[tuple[Kind, int, Verdict]], num_cases: int, seed: int, seconds: float, *, has_disks: bool
) -> dict[str, Any]:
    names = list(dict.fromkeys(kind.name for kinds in _ROWS for kind in kinds))
    rows = []
    for name in names:
        own = [verdict for kind, _, verdict in verdicts if kind.name == name]
        counts = Counter(verdict.ending for verdict in own)
        bitwise = sum(verdict.is_bitwise for verdict in own)
        rows.append(
            {"kind": name, "num_cases": len(own), "num_bitwise": bitwise} | {each: counts[each] for each in ENDINGS}
        )
    failures = [
        {"kind": str(kind), "seed": each_seed, "words": verdict.words}
        for kind, each_seed, verdict in verdicts
        if verdict.ending == "failure"
    ]
    notes = [
        f"failed: {each['words']}; repeat it by --cases 1 --seed {each['seed']} --only {each['kind']!r}"
        for each in failures
    ]
    if not has_disks:
        notes.append("full and read-only disks are left out, because this process may not mount any")
    if not HAS_TINKER:
        notes.append("Tinker servers are left out, because treering[tinker] is not installed")
    return {
        "num_cases": num_cases,
        "seed": seed,
        "seconds": seconds,
        "kinds": [row for row in rows if row["num_cases"]],
        "failures": failures,
        "notes": notes,
    }
