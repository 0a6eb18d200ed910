"""Runs `treering train`: builds task, model, loop, run folder and metric sinks from a configuration, and trains."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.display.log_console import note_doing
from treering.cli.display.progress import note_compiling
from treering.cli.display.run_display import RlProgress, RunDisplay, SavingNote
from treering.cli.hub import with_commits
from treering.cli.push.card import model_card
from treering.cli.ranks import is_first, joined
from treering.cli.run_folder import (
    HISTORY_FOLDER,
    chat_settings,
    locked,
    open_sinks,
    printed_warnings,
    write_settings,
)
from treering.cli.run_notes import RunLength, budget_note
from treering.cli.settings import attention_in_words, compute_options, parameters_in_words, with_costs
from treering.cli.signals import deferred_to
from treering.cli.starts import log_start
from treering.cli.train.held_out import held_out_notes, load_held_out, load_trained, measure_rewards
from treering.cli.train.logs import Loop, step_logs
from treering.cli.train.loop import make_loop, make_model
from treering.cli.train.settings import identity
from treering.cli.train.summary import TrainSummary, times_of, totals
from treering.cli.train.task import TaskSource
from treering.cli.train.warmup import warm_up
from treering.config import RlConfig
from treering.errors import StateError
from treering.history.draft.kernel import propose
from treering.metrics import Metrics
from treering.ranks.group import RankGroup, all_ranks
from treering.rl.loop import RlLoop
from treering.rl.step_report import RlStepReport
from treering.runtime.pipeline import PipelineLoop
from treering.train.loop.batches import StepPlan
from treering.train.loop.checkpoint import CheckpointStore, checkpoint_path
from treering.train.loop.compute import ComputeOptions, num_threads
from treering.train.loop.held_out import Evaluation
from treering.train.loop.interruption import Interruption
from treering.train.loop.run import CHECKPOINTS_FOLDER, Opened, knows_first, open_run, run_steps
from treering.tree.build import fill_forest


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
        evaluation: on held-out prompts; None without any.
        interruption: ends them at a signal.
    """

    config: RlConfig
    source: TaskSource
    loop: Loop
    opened: Opened
    num_steps: int
    steps: Iterator[RlStepReport]
    evaluation: Evaluation | None
    interruption: Interruption


def train(config: RlConfig, *, config_dir: Path, console: Console) -> TrainSummary:
    """Trains as a configuration in the folder `config_dir` says, or resumes the run that its run folder holds."""
    with (
        joined(),
        open_training(config, config_dir=config_dir, console=console) as run,
        RunDisplay(
            title=str(config.run.dir), num_steps=run.num_steps, first_step=run.opened.step, console=console
        ) as display,
        deferred_to(run.interruption, console.print),
    ):
        run.loop.on_progress = run.interruption.checked(display.show_phase)
        if run.evaluation is not None:
            run.evaluation.on_measured = display.show_evaluation
        reports = _show_each(run.steps, RlProgress(display), console)
    last_step, total = reports[-1].step if reports else run.opened.step, totals(reports)
    if total.num_unscored and not total.num_rollouts:
        raise StateError(
            f"a run learns from rewards, and {run.source.task.reward_name} returned None for {total.num_unscored} "
            f"rollouts and scored none; return a number for some"
        )
    pipeline = run.loop if isinstance(run.loop, PipelineLoop) else None
    measured = None if pipeline is None else pipeline.measured
    return TrainSummary(
        run_dir=str(config.run.dir),
        task=run.source.kind,
        num_prompts=len(run.source.task.prompts),
        num_parameters=sum(weight.numel() for weight in run.loop.model.parameters()),
        resumed_from_step=run.opened.resume_step,
        num_steps=last_step,
        total=total,
        checkpoint=str(checkpoint_path(config.run.dir / CHECKPOINTS_FOLDER, last_step)),
        account=None if pipeline is None else pipeline.account.as_dict(),
        latency=None if measured is None else times_of(measured),
    )


@contextmanager
def open_training(config: RlConfig, *, config_dir: Path, console: Console) -> Iterator[OpenRun]:
    """Opens a run: lock, model, warm-up, newest checkpoint, logs; closes the logs at the end.

    Of several ranks the first one alone has the lock and the logs.
    """
    lock = locked(config.run.dir) if is_first() else nullcontext()
    with lock, _opened(config, config_dir=config_dir, console=console) as run:
        yield run


@contextmanager
def _opened(config: RlConfig, *, config_dir: Path, console: Console) -> Iterator[OpenRun]:
    group = all_ranks()
    # Its own progress bars would flicker through ours.
    transformers_logging.disable_progress_bar()
    if group.rank == 0:
        config = with_commits(_with_chat_settings(config), config_dir)
    config = group.gather(config)[0]
    note_doing(console, "reading the task")
    source, held = load_trained(config, config_dir), load_held_out(config, config_dir)
    if held is not None:
        source = replace(source, notes=(*source.notes, *held_out_notes(held, source)))
    source.try_reward()
    note_doing(console, "loading the model")
    model = make_model(config, config_dir, source)
    note_doing(console, "preparing the first step")
    note_compiling(console, fill_forest, propose)
    length = _run_length(config, source)
    num_steps = length.total
    compute = _compute(config, model, group, num_steps)
    # Before its weights are sharded.
    run_identity = identity(config, source, model)
    loop = make_loop(config, config_dir, source, model, compute=compute, num_steps=num_steps, group=group)
    checkpoints = CheckpointStore(
        folder=config.run.dir / CHECKPOINTS_FOLDER,
        identity=run_identity,
        keep=config.run.keep,
        card=partial(model_card, config.run.dir, has_tokenizer=source.tokenizer is not None),
        tokenizer=source.tokenizer,
        hints=config.run.dir / HISTORY_FOLDER,
        group=group,
    )
    with ExitStack() as stack:
        stack.callback(source.close)
        if held is not None:
            stack.callback(held.close)
        if isinstance(loop, PipelineLoop):
            stack.enter_context(loop)
        with printed_warnings(console):
            opened = open_run(config.run.dir, loop, checkpoints)
        if group.rank == 0:
            write_settings(config, config.run, num_steps)
            log_start(config.run.dir, opened, model, max(group.size, config.runtime.trainer_ranks))
            _announce(console, config, source, model, opened, length)
        if opened.step == 0:
            warm_up(config, model, group, console)
        interruption = Interruption(group)
        metrics, on_step = Metrics([]), None
        if group.rank == 0:
            with printed_warnings(console):
                sinks = open_sinks(config.metrics, config.run.dir, opened, config.model_dump(mode="json"))
                metrics = stack.enter_context(Metrics(sinks))
                on_step = step_logs(config, source, loop, opened, metrics, stack)
        evaluation = None if held is None else _evaluation(config, held, loop, group)
        steps = run_steps(
            loop,
            num_steps=num_steps,
            save_every=config.run.save_interval,
            checkpoints=checkpoints,
            metrics=metrics,
            on_step=on_step,
            evaluation=evaluation,
            interruption=interruption,
            on_saved=SavingNote(console),
        )
        yield OpenRun(
            config=config,
            source=source,
            loop=loop,
            opened=opened,
            num_steps=num_steps,
            steps=steps,
            evaluation=evaluation,
            interruption=interruption,
        )


def _evaluation(config: RlConfig, held: TaskSource, loop: Loop, group: RankGroup) -> Evaluation:
    """Measures in this process, whatever other processes the loop has."""
    return Evaluation(
        measure=measure_rewards(config, held, loop.policy if isinstance(loop, RlLoop) else lambda: loop.model, group),
        every=config.eval.every,
        knows_first=group.gather(knows_first(config.run.dir))[0],
    )


def _with_chat_settings(config: RlConfig) -> RlConfig:
    task = config.task
    chat = chat_settings(config.run, "task", task.template, task.date)
    if task.kind != "prompts" and not task.runs_episodes:
        # Without text there is no date, and a warm-up would take another one for another run.
        chat["date"] = task.date
    return config.model_copy(update={"task": task.model_copy(update=chat)})


def _compute(config: RlConfig, model: PreTrainedModel, group: RankGroup, num_steps: int) -> ComputeOptions:
    """With the costs that one rank has measured, so that all share trees alike."""
    compute = compute_options(config.model, config.rl, num_steps)
    if group.rank == 0:
        with num_threads(config.rl.num_train_threads):
            compute = with_costs(compute, config.rl.sharing, model, config.run.dir)
    return group.gather(compute)[0]  # type: ignore[no-any-return]


def _run_length(config: RlConfig, source: TaskSource) -> RunLength:
    rl = config.rl
    return RunLength(
        section="rl",
        per_step="prompts_per_step",
        plan=StepPlan(num_tasks=len(source.task.prompts), trees_per_step=rl.prompts_per_step, seed=rl.seed),
        num_steps=rl.num_steps,
        num_epochs=rl.num_epochs,
        schedule=config.optim.schedule,
    )


def _show_each(steps: Iterator[RlStepReport], progress: RlProgress, console: Console) -> list[RlStepReport]:
    reports = []
    for report in steps:
        for note in () if report.update is None else report.update.notes:
            console.print(note, soft_wrap=True)
        progress.show(report)
        for message in report.rollouts.reward_errors[:1]:
            count = report.rollouts.num_reward_errors
            console.print(f"warning: step {report.step}: {count} rewards raised; {message}", soft_wrap=True)
        reports.append(report)
    return reports


def _announce(
    console: Console, config: RlConfig, source: TaskSource, model: PreTrainedModel, opened: Opened, length: RunLength
) -> None:
    longest = source.longest_prompt + config.sampling.max_tokens
    budget = budget_note("rl.max_batch_tokens", config.rl.max_batch_tokens, longest)
    for note in (*source.notes, budget, length.short_note() if opened.is_new else None):
        if note is not None:
            console.print(note, soft_wrap=True)
    device = next(model.parameters()).device
    console.print(
        f"{len(source.task.prompts)} prompts ({source.kind}); {parameters_in_words(model)} on {device} in "
        f"{config.model.dtype}; {length.total} steps of {config.rl.prompts_per_step} x {config.rl.group_size} rollouts "
        f"into {config.run.dir}",
        soft_wrap=True,
    )
    autocast = compute_options(config.model, config.rl).autocast
    console.print(attention_in_words(model, autocast), soft_wrap=True)
    if not opened.is_new:
        console.print(length.resume_note(config.run.dir, opened.step), soft_wrap=True)
