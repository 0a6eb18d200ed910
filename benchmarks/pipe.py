"""Claim: what the simulator predicts of a policy is what the runtime takes, within 15 %.

`treering bench pipe` runs this: the demo's policy and task on the runtime with two workers, every policy at staleness 0
and 1, runs in turns, wall time. What passes, loads and updates take, and how they slow each other down, is measured in
the workers and the trainer of the same round's other policies, never in the run that is predicted; the rest is the
simulator's, from each run's own lengths. There is little to win: on two processors a worker each keeps both busy.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_cases import OnProgress
from benchmarks.loop import environment
from benchmarks.loop_runs import RunSize, Start, Variant, configuration, count_differing, make_start
from benchmarks.pipe_machine import Machine, Observed, fit_machine, merged
from benchmarks.pipe_prediction import Prediction, predict
from benchmarks.pipe_runs import PipeRun, run_timed
from benchmarks.timing import check_runs

SEED = 0
NUM_WORKERS = 2
TARGET = 0.15
"""Largest difference between prediction and measurement that the claim allows."""

SIZE = RunSize(num_train_threads=1)
"""One thread a process, so that processors are shared by processes alone."""

POLICIES = ("fifo", "work_stealing", "longest_first", "equal_groups", "halves", "histopipe")
"""Gains are over the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """A run beside its prediction, from the times of others."""

    measured: PipeRun
    predicted: Prediction


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
    return [*plain, [variant(policy, 1, "on") for policy in dict.fromkeys((policies[0], policies[-1]))]]


def measure(
    *,
    num_runs: int = 3,
    size: RunSize = SIZE,
    start: Start | None = None,
    policies: Sequence[str] = POLICIES,
    on_progress: OnProgress = lambda words: None,
) -> dict[str, Any]:
    """The report, ready for JSON: "policies", "latency" that each was predicted with, "notes" and the "environment".

    Args:
        num_runs: rounds, each of which runs every policy.
        size: of a run.
        start: the policy that is trained; None trains the demo's.
        policies: gains are over the first; with one alone its own times predict it.
        on_progress: told what happens.

    Raises:
        InputError: fewer than one run.
    """
    check_runs(num_runs)
    groups, first = variants(policies), size.steps_per_epoch
    found: dict[str, list[Compared]] = {variant.name: [] for group in groups for variant in group}
    machines: dict[str, Machine] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = start or make_start(folder / "start", size.num_prompts, seed=SEED, on_progress=on_progress)
        for done in range(num_runs):
            ran: dict[str, PipeRun] = {}
            # By turns, so that no row has the machine's slow minutes in every round.
            for variant in (variant for group in groups for variant in _rotated(group, done)):
                on_progress(f"round {done + 1} of {num_runs}: {variant.name}")
                run_dir = folder / f"{variant.name}-{done}"
                ran[variant.name] = run_timed(
                    configuration(start, size, variant, seed=SEED, run_dir=run_dir), first=first
                )
            for group in groups:
                for variant in group:
                    own, machine = ran[variant.name], _machine_without(variant, group, groups, ran)
                    predicted = predict(
                        own.config,
                        own.run.lengths(),
                        machine,
                        first=first,
                        told=own.told,
                        slowness=own.observed.slowness,
                    )
                    found[variant.name].append(Compared(measured=own, predicted=predicted))
                    machines[variant.name] = machine
    rows = [_row(variant, found, group[0], size) for group in groups for variant in group]
    return {
        "policies": rows,
        "latency": {name: _as_json(machine) for name, machine in machines.items()},
        "target": TARGET,
        "notes": _notes(rows),
        "environment": environment(num_runs, size, start) | {"workers": NUM_WORKERS},
    }


def _rotated(group: Sequence[Variant], num_places: int) -> list[Variant]:
    first = num_places % len(group)
    return [*group[first:], *group[:first]]


def _machine_without(
    variant: Variant, group: Sequence[Variant], groups: Sequence[Sequence[Variant]], ran: dict[str, PipeRun]
) -> Machine:
    """The machine as the round's other runs saw it: passes by those of the group, the rest by those without drafts."""

    def seen(variants: Sequence[Variant]) -> Observed:
        return merged([ran[each.name].observed for each in variants if each != variant] or [ran[variant.name].observed])

    return fit_machine(seen(group), [seen(each) for each in groups[:2]], drafts=variant.drafts == "on")


def _row(variant: Variant, found: dict[str, list[Compared]], base: Variant, size: RunSize) -> dict[str, Any]:
    first, own = size.steps_per_epoch, found[variant.name]
    others = found[base.name]
    step_s = [each.measured.run.step_s(first) for each in own]
    reports = [report for each in own for report in each.measured.run.reports[first:]]
    overlaps = [report.overlap for report in reports if report.overlap is not None]
    return {
        "policy": variant.schedule,
        "staleness": variant.staleness,
        "drafts": variant.drafts,
        "is_base": variant == base,
        "step_s": median(step_s),
        "step_s_of_runs": step_s,
        "median_step_s": median(each.measured.run.median_step_s(first) for each in own),
        "slowness_of_runs": [each.measured.observed.slowness for each in own],
        "predicted_step_s": median(each.predicted.step_s for each in own),
        "ratio": median(each.predicted.step_s / seconds for each, seconds in zip(own, step_s, strict=True)),
        "speedup": median(
            other.measured.run.step_s(first) / seconds for other, seconds in zip(others, step_s, strict=True)
        ),
        "predicted_speedup": median(
            other.predicted.step_s / each.predicted.step_s for other, each in zip(others, own, strict=True)
        ),
        "bubble": sum(overlap.bubble for overlap in overlaps) / len(overlaps),
        "predicted_bubble": median(each.predicted.bubble for each in own),
        "choices": list(own[-1].measured.choices),
        "num_choices_differing": sum(
            mine != said
            for each in own
            for mine, said in zip(each.measured.choices, each.predicted.choices, strict=True)
        ),
        "tokens_per_step": sum(each.engine.num_sampled for each in reports)
        / sum(each.engine.num_rows for each in reports),
        "num_stolen": sum(overlap.num_stolen for overlap in overlaps) // len(own),
        "num_differing": count_differing(own[0].measured.run, others[0].measured.run),
        "num_rollouts": sum(len(step) for step in own[0].measured.run.latest),
    }


def _as_json(machine: Machine) -> dict[str, Any]:
    """What was measured in the last round; every round has its own."""
    alone = machine.alone
    return {
        "num_rows": alone.num_rows.tolist(),
        "decode_s": alone.decode_s.tolist(),
        "tokens_per_step": None if alone.tokens_per_step is None else alone.tokens_per_step.tolist(),
        "factors_beside": machine.factors.tolist(),
        "prefill_s_per_rollout": alone.prefill_s,
        "load_s": alone.load_s,
        "training_s": alone.training_s,
        "training_s_per_busy_worker": machine.update_s,
    }


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    cores = os.cpu_count() or 1
    notes = [
        "each row is predicted from passes, loads and updates as they were timed in the other rows of its group and "
        "round",
        f"{NUM_WORKERS} workers, a trainer, a judge and a controller share {cores} processors, and a worker keeps one "
        "busy with matrix products whatever the policy: a policy saves only what stood idle, and at staleness 1 "
        "training takes processors from the workers (latency.factors_beside)",
        "running rollouts stay on their workers here; the simulator was told so",
    ]
    slowest = max(max(row["slowness_of_runs"]) for row in rows)
    if slowest > 1.0 + TARGET / 5:
        notes.append(
            f"the machine's host gave processor time to others, so that runs took up to {slowest:.2f} times as long; "
            "predictions are of times without that, times what it was in the run that is predicted"
        )
    missed = [row for row in rows if abs(row["ratio"] - 1.0) > TARGET]
    names = ", ".join(f"{_name(row)} ({row['ratio']:.2f})" for row in missed)
    notes.append(
        f"predicted within {TARGET:.0%}: {len(rows) - len(missed)} of {len(rows)}" + (f"; not {names}" if names else "")
    )
    uneven = [
        f"{_name(row)} ({min(row['step_s_of_runs']):.2f} to {max(row['step_s_of_runs']):.2f} s)"
        for row in rows
        if max(row["step_s_of_runs"]) > (1.0 + TARGET) * min(row["step_s_of_runs"])
    ]
    if uneven:
        notes.append(
            f"runs of one row that differ by more than {TARGET:.0%}, so that something else ran on the machine and no "
            f"prediction can be held against them: {', '.join(uneven)}"
        )
    slower = [_name(row) for row in rows if row["speedup"] < 1.0]
    if slower:
        notes.append(f"slower than {rows[0]['policy']} at the same staleness: {', '.join(slower)}")
    differing = [
        f"{_name(row)} {row['num_differing']} of {row['num_rollouts']}" for row in rows if row["num_differing"]
    ]
    if differing:
        notes.append(
            f"rollouts with other tokens than {rows[0]['policy']}'s: {', '.join(differing)}; batches are summed in "
            "another order in float32, so weights differ in the last digit, and a near-tie may fall otherwise"
        )
    return notes


def _name(row: dict[str, Any]) -> str:
    return f"{row['policy']} at staleness {row['staleness']}" + (" with drafts" if row["drafts"] == "on" else "")
