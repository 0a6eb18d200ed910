"""Report on `treering train`: the rollouts and times of each step, and the summary of a call."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.table import Table

from treering.cli.display import facts_table
from treering.cli.session import TrainingRun, steps_cell
from treering.cli.train_task import TaskSource
from treering.config import RlConfig
from treering.data import Trajectory
from treering.errors import plural
from treering.files.step_lines import append, reopen
from treering.files.writing import writing
from treering.metrics import METRICS_FILE, Completion, Metrics, num_logged
from treering.report.rollout_views import ROLLOUTS_FOLDER
from treering.report.run_data import TIMELINE_FILE, held_out
from treering.rl.loop import RlLoop
from treering.rl.step_report import RlStepReport, RolloutLog, total_stats
from treering.rl.tasks.sums import SumTask
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.cluster import Latency
from treering.types import TokenIds


def timeline_log(file: Path, resume_step: int | None) -> Callable[[RlStepReport], None]:
    """Return a function that appends the spans of a step to `timeline.jsonl` of a run with workers.

    Lines of steps after `resume_step`, all if None, are removed: the run repeats these steps.

    Raises:
        StateError: the file cannot be read or written; also by the function.

    Example: `{"step": 3, "worker": 1, "started_s": 1767261600.2, "ended_s": 1767261604.9, "busy_s": 4.5,
    "num_rollouts": 32}`; the trainer's line has "worker": null.
    """
    reopen([file], resume_step or 0, {}, log=file)

    def write(report: RlStepReport) -> None:
        spans = () if report.overlap is None else report.overlap.spans
        lines = "".join(json.dumps({"step": report.step, **asdict(span)}) + "\n" for span in spans).encode()
        with writing(file, len(lines)), file.open("ab", buffering=0) as log:
            append(log, lines)

    return write


MAX_CHARACTERS = 4000
"""Most characters of a prompt or completion in a table; the middle of a longer text is cut."""


def completions_of(trajectories: Sequence[Trajectory], num_rows: int, source: TaskSource) -> list[Completion]:
    """Return up to `num_rows` rollouts from the worst reward to the best, evenly spaced.

    Example: 3 of five rollouts with rewards 0.1 to 0.5 are those with 0.1, 0.3 and 0.5.
    """
    ranked = sorted(trajectories, key=lambda each: -np.inf if each.reward is None else each.reward)
    chosen = np.unique(np.linspace(0, len(ranked) - 1, min(num_rows, len(ranked))).round().astype(int))
    return [_completion(ranked[rank], source) for rank in chosen]


def _completion(each: Trajectory, source: TaskSource) -> Completion:
    assert each.tokens is not None, "rollouts have tokens"
    assert each.loss_mask is not None, "rollouts have a mask"
    start = int(each.loss_mask.argmax()) if each.loss_mask.any() else each.tokens.size
    return Completion(
        prompt=_text(each.tokens[:start], source),
        completion=_text(each.tokens[start:], source),
        reward=each.reward,
        advantage=each.advantage,
    )


def _text(tokens: TokenIds, source: TaskSource) -> str:
    task = source.task
    decode = task.decode if isinstance(task, SumTask) else source.decode
    text = " ".join(map(str, tokens.tolist())) if decode is None else decode(tokens)
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} […] {text[-half:]}"


Loop: TypeAlias = RlLoop | PipelineLoop

OnStep: TypeAlias = Callable[[RlStepReport], dict[str, float]]
"""Logs a step, and returns metrics of what it has logged."""


@dataclass(kw_only=True, eq=False)
class RlRun(TrainingRun[RlStepReport]):
    """A run of `treering train`, with its task."""

    config: RlConfig
    source: TaskSource
    loop: Loop


def step_logs(run: RlRun, metrics: Metrics) -> OnStep:
    """Return a function that writes each step's rollouts and completion tables and, with workers, the timeline."""
    config, loop, folder = run.config, run.loop, run.config.run.dir
    rollouts = timeline = None
    if config.run.rollouts == "on":
        expected = num_logged(folder / METRICS_FILE)
        rollouts = RolloutLog(folder / ROLLOUTS_FOLDER, resume_step=run.opened.resume_step, expected=expected)
    if isinstance(loop, PipelineLoop):
        timeline = timeline_log(folder / TIMELINE_FILE, run.opened.resume_step)

    def on_step(report: RlStepReport) -> dict[str, float]:
        if timeline is not None:
            timeline(report)
        num_rows = config.metrics.log_completions
        if num_rows and (report.step == 1 or report.step % 10 == 0):
            metrics.log_completions(report.step, completions_of(loop.latest, num_rows, run.source))
        return {} if rollouts is None else rollouts.write(report.epoch, loop.latest)

    return on_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RlTotals:
    """Sums and means over the steps of one call; zero without a step, and then without rewards."""

    first_reward: float | None
    """Mean over the rollouts of this call's first epoch; None without any."""
    last_reward: float | None
    """Mean over the rollouts of its last epoch."""
    num_updates: int
    """Steps that changed the weights."""
    num_groups: int
    num_zero_variance: int
    """Groups whose rollouts all had the same reward."""
    num_reward_errors: int
    num_unscored: int
    num_empty: int
    num_overlong: int
    seconds: float
    rollout_s: float
    train_s: float
    update_s: float
    num_rollouts: int
    num_sampled: int
    sampled_per_s: float
    """Sampled tokens per second of rollout."""
    tokens_per_forward: float
    num_drafted: int
    acceptance: float
    flat_tokens: int
    """Trained tokens of all prompts and rollouts."""
    unique_tokens: int
    """Tokens that were computed for them."""
    sharing: float


def summary_of(run: RlRun, total: RlTotals, reports: Sequence[RlStepReport]) -> tuple[dict[str, Any], Table]:
    """Sum up the steps of a call, whose `totals` are given: as JSON, and as a table for the terminal.

    `account` has the outcome of every rollout of the run (`treering.runtime.account`) and `latency` the times that
    schedules use (`times_of`); None without workers, and if nothing was measured.
    """
    pipeline = run.loop if isinstance(run.loop, PipelineLoop) else None
    measured = None if pipeline is None else pipeline.measured
    account = None if pipeline is None else pipeline.account.as_dict()
    summary = {
        **run.summary_of(reports),
        "task": run.config.task.kind,
        "num_prompts": len(run.source.task.prompts),
        "total": asdict(total),
        "account": account,
        "latency": None if measured is None else times_of(measured),
    }
    rewards = ["-" if mean is None else f"{mean:.3f}" for mean in (total.first_reward, total.last_reward)]
    troubles = {"empty": total.num_empty, "over-long": total.num_overlong, "without reward": total.num_reward_errors}
    troubles["unscored"] = total.num_unscored
    counted = [f"{name} {count:,}" for name, count in troubles.items() if count]
    rows = {
        "task": f"{summary['task']}, {plural(summary['num_prompts'], 'prompt')}",
        "model": f"{summary['num_parameters']:,} parameters",
        "steps": steps_cell(summary, f"updates {total.num_updates}"),
        "reward": f"{' -> '.join(rewards)} (first and last epoch)",
        **held_out(summary["evaluations"]),
        "groups": f"{total.num_groups:,}, with equal rewards {total.num_zero_variance:,}",
        "rollouts": ", ".join([f"{total.num_rollouts:,}", *counted]),
        "seconds": f"{total.seconds:,.1f}: rollout {total.rollout_s:,.1f}, training {total.train_s:,.1f}, "
        f"update {total.update_s:,.1f}",
        "sampled tokens": f"{total.num_sampled:,} ({total.sampled_per_s:,.0f} per second)",
        "tokens per forward": f"{total.tokens_per_forward:.2f}",
        "drafted tokens": f"{total.num_drafted:,}, accepted {total.acceptance:.0%}",
        "trained tokens": f"{total.flat_tokens:,} flat, {total.unique_tokens:,} computed",
        "sharing": f"{total.sharing:.3f}",
        **({} if account is None else _account_rows(account)),
        "checkpoint": summary["checkpoint"],
    }
    return summary, facts_table(f"treering train: {summary['run_dir']}", rows)


def _account_rows(account: Mapping[str, int]) -> dict[str, str]:
    left_out = {"with equal rewards": "without_variance", "without reward": "reward_errors", "empty": "empty"}
    ends = [f"{account['trained']:,} trained", *(f"{account[key]:,} {text}" for text, key in left_out.items())]
    if account["unscored"]:
        ends.append(f"{account['unscored']:,} unscored")
    deaths = (
        f"{account['worker_deaths']} workers ({account['sampled_again']:,} rollouts sampled again), "
        f"{account['reward_worker_deaths'] + account['reward_workers_stopped']} reward workers "
        f"({account['evaluated_again']:,} evaluated again), "
        f"{account['trainer_deaths']} trainers ({account['steps_trained_again']:,} steps trained again)"
    )
    return {"account": f"{account['scheduled']:,} scheduled = {' + '.join(ends)}", "deaths": deaths}


_COUNTS = (
    *("num_groups", "num_zero_variance", "num_reward_errors", "num_unscored", "num_empty", "num_overlong"),
    "num_rollouts",
)


def totals(reports: Sequence[RlStepReport]) -> RlTotals:
    """Sum up step reports.

    Example: two epochs whose rewards average 0.4 and 0.6 have first_reward 0.4 and last_reward 0.6.
    """
    engine = total_stats(report.engine for report in reports)
    updates = [report.update for report in reports if report.update is not None]
    rollouts = [report.rollouts for report in reports]
    rollout_s = sum(report.phases.rollout_s for report in reports)
    flat, unique = sum(u.num_branch_tokens for u in updates), sum(u.num_tokens for u in updates)
    return RlTotals(
        first_reward=_reward_of_epoch(reports, reports[0].epoch) if reports else None,
        last_reward=_reward_of_epoch(reports, reports[-1].epoch) if reports else None,
        num_updates=len(updates),
        **{name: sum(getattr(part, name) for part in rollouts) for name in _COUNTS},
        seconds=sum(report.phases.step_s for report in reports),
        rollout_s=rollout_s,
        train_s=sum(report.phases.train_s for report in reports),
        update_s=sum(report.phases.update_s for report in reports),
        num_sampled=engine.num_sampled,
        sampled_per_s=engine.num_sampled / rollout_s if rollout_s else 0.0,
        tokens_per_forward=engine.tokens_per_forward,
        num_drafted=engine.num_drafted,
        acceptance=engine.acceptance,
        flat_tokens=flat,
        unique_tokens=unique,
        sharing=1.0 - unique / flat if flat else 0.0,
    )


def times_of(latency: Latency) -> dict[str, float]:
    """Return the times of a linear latency in seconds: "step_s" per pass, "row_s" per row, and the others by name.

    Example: passes of 1 and 2 rows that take 3 and 4 ms have step_s 0.002 and row_s 0.001.
    """
    row_s = float(latency.decode_s[-1] - latency.decode_s[0]) / int(latency.num_rows[-1] - latency.num_rows[0])
    step_s = float(latency.decode_s[0]) - row_s * int(latency.num_rows[0])
    others = {name: getattr(latency, name) for name in ("prefill_s", "load_s", "training_s")}
    # Rounding may give slightly less than 0.
    return {"step_s": max(0.0, step_s), "row_s": row_s, **others}


def _reward_of_epoch(reports: Sequence[RlStepReport], epoch: int) -> float | None:
    parts = [report.rollouts for report in reports if report.epoch == epoch and report.rollouts.reward_mean is not None]
    count = sum(part.num_rollouts for part in parts)
    # Add weighted means, because a sum of very large rewards may be infinite.
    return sum(part.num_rollouts / count * (part.reward_mean or 0.0) for part in parts) if count else None
