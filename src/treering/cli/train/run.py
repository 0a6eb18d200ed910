"""Runs `treering train`: builds task, model, loop, run folder and metric sinks from a configuration, and trains."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.display.progress import note_compiling
from treering.cli.display.run_display import RlProgress, RunDisplay
from treering.cli.hub import with_commits
from treering.cli.push.card import model_card
from treering.cli.run_folder import (
    HISTORY_FOLDER,
    ROLLOUTS_FOLDER,
    locked,
    open_sinks,
    printed_warnings,
    run_date,
    write_settings,
)
from treering.cli.settings import attention_in_words, compute_options, count_steps, parameters_in_words, with_costs
from treering.cli.train.loop import load_source, make_loop, make_model
from treering.cli.train.settings import identity
from treering.cli.train.summary import TrainSummary, times_of, totals
from treering.cli.train.task import TaskSource
from treering.cli.train.timeline import TimelineLog
from treering.cli.train.warmup import warm_up
from treering.config import RlConfig
from treering.history.draft.kernel import propose
from treering.metrics import Metrics, num_logged
from treering.report.timeline import TIMELINE_FILE
from treering.rl.loop import RlLoop
from treering.rl.rollout_log import RolloutLog
from treering.rl.step_report import RlStepReport
from treering.runtime.pipeline import PipelineLoop
from treering.train.loop.batches import StepPlan
from treering.train.loop.checkpoint import CheckpointStore, checkpoint_path
from treering.train.loop.compute import ComputeOptions, num_threads
from treering.train.loop.run import CHECKPOINTS_FOLDER, METRICS_FILE, Opened, open_run, run_steps
from treering.tree.build import lay_out

Loop: TypeAlias = RlLoop | PipelineLoop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenRun:
    """An open run, new or resumed.

    Attributes:
        config: as it was read.
        source: its task.
        loop: new, or in the state of the newest checkpoint.
        opened: whether and where the run resumes.
        num_steps: of the whole run.
        steps: each item trains, logs and saves one step and is its report.
    """

    config: RlConfig
    source: TaskSource
    loop: Loop
    opened: Opened
    num_steps: int
    steps: Iterator[RlStepReport]


def train(config: RlConfig, *, config_dir: Path, console: Console) -> TrainSummary:
    """Trains as a configuration in the folder `config_dir` says, or resumes the run that its run folder holds."""
    with (
        open_training(config, config_dir=config_dir, console=console) as run,
        RunDisplay(
            title=str(config.run.dir), num_steps=run.num_steps, first_step=run.opened.step, console=console
        ) as display,
    ):
        reports = _show_each(run.steps, RlProgress(display), console)
    last_step = reports[-1].step if reports else run.opened.step
    pipeline = run.loop if isinstance(run.loop, PipelineLoop) else None
    measured = None if pipeline is None else pipeline.measured
    return TrainSummary(
        run_dir=str(config.run.dir),
        task=run.source.kind,
        num_prompts=len(run.source.task.prompts),
        num_parameters=sum(weight.numel() for weight in run.loop.model.parameters()),
        resumed_from_step=run.opened.resume_step,
        num_steps=last_step,
        total=totals(reports),
        checkpoint=str(checkpoint_path(config.run.dir / CHECKPOINTS_FOLDER, last_step)),
        account=None if pipeline is None else pipeline.account.as_dict(),
        latency=None if measured is None else times_of(measured),
    )


@contextmanager
def open_training(config: RlConfig, *, config_dir: Path, console: Console) -> Iterator[OpenRun]:
    """Opens a run: lock, model, warm-up, newest checkpoint, logs; closes the logs at the end."""
    with locked(config.run.dir), _opened(config, config_dir=config_dir, console=console) as run:
        yield run


@contextmanager
def _opened(config: RlConfig, *, config_dir: Path, console: Console) -> Iterator[OpenRun]:
    # Its own progress bars would flicker through ours.
    transformers_logging.disable_progress_bar()
    if config.task.template == "hf":
        date = run_date(config.run, "task", config.task.date)
        config = config.model_copy(update={"task": config.task.model_copy(update={"date": date})})
    config = with_commits(config, config_dir)
    source = load_source(config, config_dir)
    model = make_model(config, config_dir, source)
    note_compiling(console, lay_out, propose)
    num_steps = _count_steps(config, source)
    loop = make_loop(config, config_dir, source, model, compute=_compute(config, model), num_steps=num_steps)
    checkpoints = CheckpointStore(
        folder=config.run.dir / CHECKPOINTS_FOLDER,
        identity=identity(config, source, model),
        keep=config.run.keep,
        card=partial(model_card, config.run.dir, has_tokenizer=source.tokenizer is not None),
        tokenizer=source.tokenizer,
        hints=config.run.dir / HISTORY_FOLDER,
    )
    with ExitStack() as stack:
        if isinstance(loop, PipelineLoop):
            stack.enter_context(loop)
        with printed_warnings(console):
            opened = open_run(config.run.dir, loop, checkpoints)
        write_settings(config, config.run)
        _announce(console, config, source, model, opened, num_steps)
        if opened.step == 0:
            warm_up(config, model, console)
        with printed_warnings(console):
            metrics = stack.enter_context(
                Metrics(open_sinks(config.metrics, config.run.dir, opened, config.model_dump(mode="json")))
            )
            on_step = _logs(config, loop, opened, stack)
        steps = run_steps(
            loop,
            num_steps=num_steps,
            save_every=config.run.save_every,
            checkpoints=checkpoints,
            metrics=metrics,
            on_step=on_step,
        )
        yield OpenRun(config=config, source=source, loop=loop, opened=opened, num_steps=num_steps, steps=steps)


def _compute(config: RlConfig, model: PreTrainedModel) -> ComputeOptions:
    with num_threads(config.rl.num_train_threads):
        return with_costs(compute_options(config.model, config.rl), config.rl.sharing, model, config.run.dir)


def _count_steps(config: RlConfig, source: TaskSource) -> int:
    rl = config.rl
    plan = StepPlan(num_tasks=len(source.task.prompts), trees_per_step=rl.prompts_per_step, seed=rl.seed)
    return count_steps(plan, num_steps=rl.num_steps, num_epochs=rl.num_epochs)


def _logs(config: RlConfig, loop: Loop, opened: Opened, stack: ExitStack) -> Callable[[RlStepReport], dict[str, float]]:
    """Writes the rollouts of each step and, with workers, when each of them worked."""
    log_rollouts = _rollout_log(config, loop, opened)
    timeline = None
    if isinstance(loop, PipelineLoop):
        timeline = stack.enter_context(TimelineLog(config.run.dir / TIMELINE_FILE, resume_step=opened.resume_step))

    def on_step(report: RlStepReport) -> dict[str, float]:
        if timeline is not None:
            timeline.write(report)
        return {} if log_rollouts is None else log_rollouts(report)

    return on_step


def _rollout_log(config: RlConfig, loop: Loop, opened: Opened) -> Callable[[RlStepReport], dict[str, float]] | None:
    if config.run.rollouts == "off":
        return None
    log = RolloutLog(
        config.run.dir / ROLLOUTS_FOLDER,
        resume_step=opened.resume_step,
        expected=num_logged(config.run.dir / METRICS_FILE),
    )
    return lambda report: log.write(report.epoch, loop.latest)


def _show_each(steps: Iterator[RlStepReport], progress: RlProgress, console: Console) -> list[RlStepReport]:
    reports = []
    for report in steps:
        progress.show(report)
        for message in report.rollouts.reward_errors[:1]:
            count = report.rollouts.num_reward_errors
            console.print(f"warning: step {report.step}: {count} rewards raised; {message}", soft_wrap=True)
        reports.append(report)
    return reports


def _announce(
    console: Console, config: RlConfig, source: TaskSource, model: PreTrainedModel, opened: Opened, num_steps: int
) -> None:
    for note in source.notes:
        console.print(note, soft_wrap=True)
    device = next(model.parameters()).device
    console.print(
        f"{len(source.task.prompts)} prompts ({source.kind}); {parameters_in_words(model)} on {device} in "
        f"{config.model.dtype}; {num_steps} steps of {config.rl.prompts_per_step} x {config.rl.group_size} rollouts "
        f"into {config.run.dir}",
        soft_wrap=True,
    )
    autocast = compute_options(config.model, config.rl).autocast
    console.print(attention_in_words(model, autocast), soft_wrap=True)
    if not opened.is_new:
        console.print(f"resuming the run in {config.run.dir} after step {opened.step}", soft_wrap=True)
