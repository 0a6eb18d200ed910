"""What `treering train` logs of a step besides its metrics: its rollouts, and when each process worked on it."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import numpy as np

from treering.cli.train.task import TaskSource
from treering.closing import Closing
from treering.config import RlConfig
from treering.config.metrics import RlMetricsConfig
from treering.data import Trajectory
from treering.files.step_lines import append, reopen
from treering.files.writing import check_regular, writing
from treering.metrics import Completion, Metrics, num_logged
from treering.report.rollouts import ROLLOUTS_FOLDER
from treering.report.timeline import TIMELINE_FILE
from treering.rl.loop import RlLoop
from treering.rl.rollout_log import RolloutLog
from treering.rl.step_report import RlStepReport
from treering.rl.tasks.sums import SumTask
from treering.runtime.pipeline import PipelineLoop
from treering.train.loop.run import METRICS_FILE, Opened
from treering.types import TokenIds


class TimelineLog(Closing):
    """The file `timeline.jsonl` of a run with workers; use it in a `with` statement.

    Example: `{"step": 3, "worker": 1, "started_s": 1767261600.2, "ended_s": 1767261604.9, "busy_s": 4.5,
    "num_rollouts": 32}`; the trainer's line has the worker null.
    """

    def __init__(self, file: Path, *, resume_step: int | None) -> None:
        """Lines of steps after `resume_step`, or all if it is None, are removed: the run repeats these steps.

        Raises:
            StateError: the file cannot be read or written.
        """
        self._path = file
        with writing(file):
            check_regular(file)
        reopen([file], resume_step or 0, {}, log=file)
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)

    def write(self, report: RlStepReport) -> None:
        """Appends the spans of one step.

        Raises:
            StateError: the disk is full.
        """
        spans = () if report.overlap is None else report.overlap.spans
        lines = [json.dumps({"step": report.step, **asdict(span)}).encode() + b"\n" for span in spans]
        with writing(self._path, sum(map(len, lines))):
            append(self._file, b"".join(lines))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


MAX_CHARACTERS = 4000
"""Of a prompt and of a completion in a table; the middle of a longer one is left out."""


def is_table_due(config: RlMetricsConfig, step: int) -> bool:
    """Whether a step has a table.

    Example: every 10 steps it is due after the steps 1, 10, 20 and so on.
    """
    return config.log_completions > 0 and (step == 1 or step % config.log_completions_every == 0)


def completions_of(trajectories: Sequence[Trajectory], num_rows: int, source: TaskSource) -> list[Completion]:
    """Rollouts from the worst reward to the best, evenly spaced among all, all of them where there are fewer.

    Example: 3 of five rollouts with rewards 0.1 to 0.5 are those with 0.1, 0.3 and 0.5.
    """
    ranked = sorted(trajectories, key=lambda each: -np.inf if each.reward is None else each.reward)
    chosen = np.unique(np.linspace(0, len(ranked) - 1, min(num_rows, len(ranked))).round().astype(int))
    return [_completion(ranked[place], source) for place in chosen]


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


def step_logs(
    config: RlConfig, source: TaskSource, loop: Loop, opened: Opened, metrics: Metrics, stack: ExitStack
) -> OnStep:
    """Writes the rollouts of each step, some of them to trackers, and, with workers, when each of them worked."""
    log_rollouts = _rollout_log(config, loop, opened)
    timeline = None
    if isinstance(loop, PipelineLoop):
        timeline = stack.enter_context(TimelineLog(config.run.dir / TIMELINE_FILE, resume_step=opened.resume_step))

    def on_step(report: RlStepReport) -> dict[str, float]:
        if timeline is not None:
            timeline.write(report)
        if is_table_due(config.metrics, report.step):
            metrics.log_completions(report.step, completions_of(loop.latest, config.metrics.log_completions, source))
        return {} if log_rollouts is None else log_rollouts(report)

    return on_step


def _rollout_log(config: RlConfig, loop: Loop, opened: Opened) -> OnStep | None:
    if config.run.rollouts == "off":
        return None
    log = RolloutLog(
        config.run.dir / ROLLOUTS_FOLDER,
        resume_step=opened.resume_step,
        expected=num_logged(config.run.dir / METRICS_FILE),
    )
    return lambda report: log.write(report.epoch, loop.latest)
