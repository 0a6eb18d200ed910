"""What `treering train` logs of a step besides its metrics: its rollouts, and what its workers did when."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

from treering.cli.run_folder import ROLLOUTS_FOLDER
from treering.cli.train.completions import completions_of, is_table_due
from treering.cli.train.task import TaskSource
from treering.cli.train.timeline import TimelineLog
from treering.config import RlConfig
from treering.metrics import Metrics, num_logged
from treering.report.timeline import TIMELINE_FILE
from treering.rl.loop import RlLoop
from treering.rl.rollout_log import RolloutLog
from treering.rl.step_report import RlStepReport
from treering.runtime.pipeline import PipelineLoop
from treering.train.loop.run import METRICS_FILE, Opened

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
