"""GRPO on a task by the plain loop and by Treering's, step by step in turns; what both log becomes curves and sums."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common.progress import OnProgress
from benchmarks.real.tasks import write_task
from treering import metrics
from treering.analysis.recording import record
from treering.analysis.replay import replay
from treering.cli.demo import SIDES, DemoSize, Side, write_config
from treering.cli.display import PlainConsole
from treering.cli.inspect.drafts import rollout_files
from treering.cli.train import open_training
from treering.cli.train_report import RlRun
from treering.config import RlConfig, load
from treering.data import read_trajectories, render
from treering.report.run_data import read_run
from treering.rl.step_report import RlStepReport

SIZE = DemoSize(num_prompts=32, prompts_per_step=4, group_size=8, num_epochs=3, max_batch=32)
SOURCES = ("siblings", "history", "own", "others")
STEPS_FILE = "steps.jsonl"


class PhaseClock:
    """Processor seconds of a loop's steps by phase; what is saved and evaluated between steps is left out."""

    def __init__(self, run: RlRun) -> None:
        """Times `run.loop.step` from now on."""
        self._step = run.loop.step
        self.seconds: Mapping[str, float] = {}
        self._running, self._phase, self._since = Counter[str](), "sampling", 0.0
        run.loop.step = self._timed  # type: ignore[method-assign]
        run.loop.on_progress = self._hear

    def _hear(self, phase: str, num_done: int, num_total: int) -> None:
        now = time.process_time()
        self._running[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _timed(self) -> RlStepReport:
        self._running.clear()
        self._phase, self._since = "sampling", time.process_time()
        report = self._step()
        # Optimiser and hand-over count as training.
        self._hear("training", 0, 0)
        # Evaluations are heard too, after the step.
        self.seconds = dict(self._running)
        return report


def train_both(
    folder: Path, model: Path, task: str, *, seed: int, temperature: float, size: DemoSize, on_progress: OnProgress
) -> dict[str, Any]:
    """The rows of both sides' steps and evaluations; goes on where an earlier call was ended."""
    own = write_task(task, folder, model, size, seed=seed, temperature=temperature)
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    with ExitStack() as stack:
        runs: dict[Side, RlRun] = {}
        for side in SIDES:
            config = load(RlConfig, write_config(folder, size, own, side=side, seed=seed))
            quiet = PlainConsole(quiet=True)
            runs[side] = stack.enter_context(open_training(config, config_dir=folder, console=quiet))
        clocks = {side: PhaseClock(run) for side, run in runs.items()}
        cut_rows(folder / STEPS_FILE, {side: run.opened.step for side, run in runs.items()})
        behind: Callable[[Side], int] = lambda side: runs[side].loop.num_steps_done  # noqa: E731
        while behind(side := min(SIDES, key=behind)) < runs[side].num_steps:
            report = next(runs[side].steps)
            row = {"side": side, **_row(report), "processor_s": dict(clocks[side].seconds)}
            with (folder / STEPS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            on_progress(f"{folder.name} {side}: step {report.step} of {runs[side].num_steps}")
    for side in SIDES:
        # With the optimiser they take 1.6 GB; what later parts need is the policy alone.
        for state in (folder / side / "checkpoints").glob("*/*.pt"):
            state.unlink()
    rows = [json.loads(line) for line in (folder / STEPS_FILE).read_text(encoding="utf-8").splitlines()]
    return {
        "task": task,
        "seed": seed,
        "temperature": temperature,
        "sides": {side: _summary([row for row in rows if row["side"] == side], folder / side) for side in SIDES},
        "drafts_by_source": drafts_by_source(folder / "treering"),
        "wall_s": time.perf_counter() - started,
        "load_average": [load_before, os.getloadavg()[0]],
    }


def cut_rows(file: Path, steps: Mapping[Side, int]) -> None:
    """Drops the rows of steps that a resumed run does again."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= steps[row["side"]]]
    file.write_text("".join(kept), encoding="utf-8")


def _row(report: RlStepReport) -> dict[str, Any]:
    update, engine, phases = report.update, report.engine, report.phases
    return {
        "step": report.step,
        "epoch": report.epoch,
        "reward": report.rollouts.reward_mean,
        "num_rollouts": report.rollouts.num_rollouts,
        "flat_tokens": 0 if update is None else update.num_branch_tokens,
        "computed_tokens": 0 if update is None else update.num_tokens,
        "num_sampled": engine.num_sampled,
        "num_rows": engine.num_rows,
        "num_drafted": engine.num_drafted,
        "num_accepted": engine.num_accepted,
        "wall_s": {"sampling": phases.rollout_s, "training": phases.train_s, "whole": phases.step_s},
    }


def _summary(rows: Sequence[Mapping[str, Any]], run: Path) -> dict[str, Any]:
    by_epoch = [[row for row in rows if row["epoch"] == epoch] for epoch in sorted({row["epoch"] for row in rows})]
    total: Callable[[str], int] = lambda name: sum(row[name] for row in rows)  # noqa: E731
    processor = {phase: sum(row["processor_s"].get(phase, 0.0) for row in rows) for phase in ("sampling", "training")}
    return {
        "reward_by_epoch": [mean(row["reward"] for row in epoch) for epoch in by_epoch],
        "held_out_reward": [row[metrics.EVAL_REWARD] for row in read_run(run).rows if metrics.EVAL_REWARD in row],
        "reward_by_step": [row["reward"] for row in rows],
        "flat_tokens": total("flat_tokens"),
        "computed_tokens": total("computed_tokens"),
        "num_sampled": total("num_sampled"),
        "tokens_per_forward_by_epoch": [
            sum(row["num_sampled"] for row in epoch) / sum(row["num_rows"] for row in epoch) for epoch in by_epoch
        ],
        "acceptance": total("num_accepted") / max(1, total("num_drafted")),
        "processor_s": {**processor, "whole": sum(processor.values())},
        "wall_s": {name: sum(row["wall_s"][name] for row in rows) for name in ("sampling", "training", "whole")},
    }


def drafts_by_source(run: Path) -> dict[str, list[float]]:
    """Tokens per verification step by epoch when a run's rollouts are replayed with drafts of one source alone."""
    rollouts = [each for file in rollout_files(run) for each in read_trajectories(file)]
    recorded = record(rollouts, render(rollouts))
    settings = {source: {"sources": (source,), "min_acceptance": 0.4} for source in SOURCES}
    settings["all"] = {"min_acceptance": 0.4}
    return {
        name: [each.tokens_per_step for each in replay(recorded, "all", settings=own).values()]
        for name, own in settings.items()
    }


def compared(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task: means over seeds, and plain over Treering."""
    rows = []
    for name in dict.fromkeys((run["task"], run["temperature"]) for run in runs):
        own = [run for run in runs if (run["task"], run["temperature"]) == name]
        sides = {side: [run["sides"][side] for run in own] for side in SIDES}
        row: dict[str, Any] = {"task": name[0], "temperature": name[1], "num_seeds": len(own)}
        for key in ("reward_by_epoch", "held_out_reward", "tokens_per_forward_by_epoch"):
            row[key] = {
                side: np.mean([each[key] for each in each_side], 0).tolist() for side, each_side in sides.items()
            }
        for clock in ("processor_s", "wall_s"):
            row[clock] = {
                side: {
                    phase: mean(each[clock][phase] for each in each_side) for phase in ("sampling", "training", "whole")
                }
                for side, each_side in sides.items()
            }
            row[f"{clock[:-2]}_ratio"] = {
                phase: row[clock]["plain"][phase] / row[clock]["treering"][phase] for phase in row[clock]["plain"]
            }
        flat, computed = (mean(each[key] for each in sides["treering"]) for key in ("flat_tokens", "computed_tokens"))
        row |= {"flat_tokens": flat, "computed_tokens": computed, "token_ratio": flat / computed if computed else 1.0}
        row["drafts_by_source"] = {
            source: np.mean([run["drafts_by_source"][source] for run in own], 0).tolist()
            for source in (*SOURCES, "all")
        }
        rows.append(row)
    return rows
