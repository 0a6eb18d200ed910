"""Claim: what the simulator predicts of a policy is what the runtime takes, within 15 %.

`python -m benchmarks pipe` runs the demo's policy and task on the runtime with two workers, every policy at staleness 0
and 1, in turns, by wall time. The times of passes, loads and updates, and how they slow each other down, come from the
same round's runs of other policies, never from the run that is predicted; the simulator does the rest from each run's
own lengths. The drafting budget uses fixed costs, because costs measured at an engine's start differ from run to run.
Runs that the machine's host disturbs are repeated. There is little to gain: with two processors, one worker each keeps
both busy.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.timing import check_runs
from benchmarks.engine.cases import OnProgress
from benchmarks.loop.bench import environment
from benchmarks.loop.runs import RunSize, Start, Variant, configuration, count_differing, make_start
from benchmarks.pipe.machine import Machine, Observed, fit_machine, merged
from benchmarks.pipe.notes import TARGET, notes_of
from benchmarks.pipe.prediction import Prediction, predict
from benchmarks.pipe.runs import PipeRun, run_undisturbed
from treering.config import RlConfig

SEED = 0
NUM_WORKERS = 2

SIZE = RunSize(num_train_threads=1)
"""One thread a process, so that processors are shared by processes alone."""

POLICIES = ("fifo", "work_stealing", "longest_first", "equal_groups", "halves", "histopipe")
"""Gains are over the first."""

ALONE = Variant(name="alone", layout="tree", workers=1)
"""A worker beside which no other one ever works. With two, full batches are seldom alone, and what the last rollouts of
a step take alone, which are long and few, does not say what a full batch would."""


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
            verify_costs="fixed",
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
    num_disturbed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = start or make_start(folder / "start", size.num_prompts, seed=SEED, on_progress=on_progress)
        for done in range(num_runs):
            ran, num_left_out = _run_round(groups, done, start, size, folder, on_progress)
            num_disturbed += num_left_out
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
        "num_disturbed": num_disturbed,
        "notes": notes_of(rows, num_workers=NUM_WORKERS, num_disturbed=num_disturbed),
        "environment": environment(num_runs, size, start) | {"workers": NUM_WORKERS},
    }


def _run_round(
    groups: Sequence[Sequence[Variant]], done: int, start: Start, size: RunSize, folder: Path, on_progress: OnProgress
) -> tuple[dict[str, PipeRun], int]:
    """Each variant's run by name, and how many runs are left out; by turns, so that none always has slow minutes."""
    ran, num_left_out = {}, 0
    for variant in [ALONE, *(variant for group in groups for variant in _rotated(group, done))]:

        def config_of(number: int, variant: Variant = variant) -> RlConfig:
            on_progress(f"round {done + 1}: {variant.name}" + (", again" if number else ""))
            run_dir = folder / f"{variant.name}-{done}-{number}"
            return configuration(start, size, variant, seed=SEED, run_dir=run_dir)

        ran[variant.name], *others = run_undisturbed(config_of, first=size.steps_per_epoch)
        num_left_out += len(others)
    return ran, num_left_out


def _rotated(group: Sequence[Variant], num_places: int) -> list[Variant]:
    first = num_places % len(group)
    return [*group[first:], *group[:first]]


def _machine_without(
    variant: Variant, group: Sequence[Variant], groups: Sequence[Sequence[Variant]], ran: dict[str, PipeRun]
) -> Machine:
    """The machine as the round's other runs saw it: passes by those of the group, the rest by those without drafts.

    The run of a single worker belongs to both, so that full batches that nothing runs beside are among the passes; it
    drafts nothing.
    """

    def seen(variants: Sequence[Variant]) -> list[Observed]:
        return [ran[each.name].observed for each in variants if each != variant] or [ran[variant.name].observed]

    quiet, busy = (seen(each) for each in groups[:2])
    passes, has_drafts, single = seen(group), variant.drafts == "on", ran[ALONE.name].observed
    curve = passes if has_drafts else [*passes, single]
    return fit_machine(merged(curve), [merged([*quiet, single]), merged(busy)], drafts=has_drafts)


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
