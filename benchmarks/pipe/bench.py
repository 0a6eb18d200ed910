"""Claim: what the simulator predicts of a policy is what the runtime takes, within 15 %.

`python -m benchmarks pipe` runs the demo's policy and task on the runtime with two workers, every policy at staleness 0
and 1, in turns, by wall time. The times of passes, loads and updates, and how processes slow passes down, come from the
other runs of the same round and staleness, never from the run that is predicted; the simulator does the rest from each
run's own lengths. The drafting
budget uses fixed costs, because costs measured at an engine's start differ from run to run. There is little to gain:
with two processors, one worker each keeps both busy.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs
from benchmarks.loop.bench import environment
from benchmarks.loop.runs import RunSize, Start, Variant, configuration, count_differing, make_start, run_loop
from benchmarks.pipe.passes import TimedRecipe, read_passes
from benchmarks.pipe.prediction import TimedRun, fit_latency, predict
from treering.config import RlConfig

NOTE = "about twenty minutes, one of which trains the small policy that is trained on"
TABLES = {"policies": ("policy", "staleness", "drafts", "step_s", "predicted_step_s", "ratio", "num_differing")}

SEED = 0
NUM_WORKERS = 2
TARGET = 0.15
"""Largest difference between prediction and measurement that the claim allows."""

SIZE = RunSize(num_train_threads=1)
"""One thread a process, so that processors are shared by processes alone."""

POLICIES = ("fifo", "longest_first", "histopipe")


def variants(policies: Sequence[str] = POLICIES) -> list[list[Variant]]:
    """The runs of a round: staleness 0, 1, and 1 with drafts; those of a group are predicted from each other."""

    def variant(policy: str, staleness: int, drafts: Any = "off") -> Variant:
        return Variant(
            name=f"{policy}-{staleness}-{drafts}",
            layout="tree",
            drafts=drafts,
            workers=NUM_WORKERS,
            schedule=policy,
            staleness=staleness,
        )

    plain = [[variant(policy, staleness) for policy in policies] for staleness in (0, 1)]
    return [*plain, [variant(policy, 1, "on") for policy in (policies[0], policies[-1])]]


def measure(
    *,
    num_runs: int = 3,
    size: RunSize = SIZE,
    start: Start | None = None,
    policies: Sequence[str] = POLICIES,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Every policy, two or more, in `num_runs` rounds from a start, or from the demo's policy."""
    check_runs(num_runs)
    groups = variants(policies)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = start or make_start(folder / "start", size.num_prompts, seed=SEED, on_progress=on_progress)
        rounds = [_run_round(groups, done, start, size, folder, on_progress) for done in range(num_runs)]
    rows = [_row(variant, group, rounds) for group in groups for variant in group]
    return {
        "policies": rows,
        "target": TARGET,
        "notes": _notes(rows),
        "environment": environment(num_runs, size, start) | {"workers": NUM_WORKERS},
    }


def run_timed(config: RlConfig, *, first: int) -> TimedRun:
    """Runs all steps of a configuration with workers that record their passes; the first `first` steps do not count."""
    # The product's own loop, with this recipe in its workers.
    with patch("treering.cli.train.TrainRecipe", TimedRecipe):
        run = run_loop(config)
    records = read_passes(config.run.dir, since_s=float(run.ended_s[first - 1]))
    return TimedRun(config=config, run=run, records=records, first=first)


def _run_round(
    groups: Sequence[Sequence[Variant]], done: int, start: Start, size: RunSize, folder: Path, on_progress: OnProgress
) -> dict[str, TimedRun]:
    """Each variant's run by name; in turns, so that slow minutes do not always meet the same one."""
    ran = {}
    for group in groups:
        first = done % len(group)
        for variant in [*group[first:], *group[:first]]:
            on_progress(f"round {done + 1}: {variant.name}")
            config = configuration(start, size, variant, seed=SEED, run_dir=folder / f"{variant.name}-{done}")
            ran[variant.name] = run_timed(config, first=size.steps_per_epoch)
    return ran


def _row(variant: Variant, group: Sequence[Variant], rounds: Sequence[dict[str, TimedRun]]) -> dict[str, Any]:
    step_s, predicted_s = [], []
    for ran in rounds:
        own, others = ran[variant.name], [ran[each.name] for each in group if each != variant]
        step_s.append(own.run.step_s(own.first))
        predicted_s.append(predict(own, *fit_latency(others)))
    run, base = (rounds[0][each.name].run for each in (variant, group[0]))
    return {
        "policy": variant.schedule,
        "staleness": variant.staleness,
        "drafts": variant.drafts,
        "step_s": median(step_s),
        "step_s_of_runs": step_s,
        "predicted_step_s": median(predicted_s),
        "ratio": median(said / real for said, real in zip(predicted_s, step_s, strict=True)),
        "num_differing": count_differing(run, base),
        "num_rollouts": sum(len(step) for step in run.latest),
    }


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = [f"{row['policy']} at staleness {row['staleness']}, drafts {row['drafts']}" for row in rows]
    missed = [
        f"{name} ({row['ratio']:.2f})"
        for name, row in zip(names, rows, strict=True)
        if abs(row["ratio"] - 1.0) > TARGET
    ]
    within = f"predicted within {TARGET:.0%}: {len(rows) - len(missed)} of {len(rows)}"
    notes = [f"{within}; not {', '.join(missed)}" if missed else within]
    differing = [name for name, row in zip(names, rows, strict=True) if row["num_differing"]]
    if differing:
        notes.append(
            f"other tokens than {rows[0]['policy']}'s: {', '.join(differing)}; float32 sums in another order change "
            "weights in the last digit, and so near-ties"
        )
    return notes
