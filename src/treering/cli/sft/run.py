"""Runs `treering sft`: builds data, model, loop, run folder and metric sinks from a configuration, and trains."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.corpus import Corpus, load_corpus
from treering.cli.data_files import show_build
from treering.cli.display.log_console import note_doing
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.display.run_display import RunDisplay, SavingNote, SftProgress
from treering.cli.hub import find_model, with_commits
from treering.cli.models import build_model, load_teacher
from treering.cli.push.card import model_card
from treering.cli.ranks import is_first, joined
from treering.cli.run_folder import locked, open_sinks, printed_warnings, write_settings
from treering.cli.run_notes import RunLength, budget_note
from treering.cli.settings import (
    attention_in_words,
    compute_options,
    optim_options,
    parameters_in_words,
    with_costs,
)
from treering.cli.sft.held_out import split_corpus
from treering.cli.sft.samples import write_samples
from treering.cli.sft.settings import as_begun, identity, loop_options, run_length, with_step_size
from treering.cli.sft.summary import SftSummary, totals
from treering.cli.signals import deferred_to
from treering.cli.starts import log_start
from treering.config import SftConfig
from treering.metrics import Metrics, Sink
from treering.ranks.group import all_ranks
from treering.train.loop.checkpoint import CheckpointStore, checkpoint_path
from treering.train.loop.held_out import Evaluation, HeldOutLoss
from treering.train.loop.interruption import Interruption
from treering.train.loop.ranks import shard_model
from treering.train.loop.resumable import StepReport
from treering.train.loop.run import CHECKPOINTS_FOLDER, Opened, knows_first, open_run, run_steps
from treering.train.loop.sft import SftLoop
from treering.tree.build import fill_forest


def train(config: SftConfig, *, config_dir: Path, console: Console) -> SftSummary:
    """Trains as a configuration in the folder `config_dir` says, or resumes the run that its run folder holds."""
    with joined(), locked(config.run.dir) if is_first() else nullcontext():
        return _train(config, config_dir=config_dir, console=console)


def _train(config: SftConfig, *, config_dir: Path, console: Console) -> SftSummary:
    group = all_ranks()
    # Its own progress bars would flicker through ours.
    transformers_logging.disable_progress_bar()
    if group.rank == 0:
        config = with_commits(as_begun(config), config_dir)
    config = group.gather(config)[0]
    note_doing(console, "reading the data")
    folder = find_model(config.model, config_dir)
    with WorkProgress(console) as reading:
        corpus = load_corpus(
            config.data,
            config_dir=config_dir,
            model=folder,
            on_build=partial(show_build, reading),
        )
    corpus, held = split_corpus(config, corpus, config_dir=config_dir, model=folder)
    config = with_step_size(config, len(corpus.tasks), group.size)
    length = run_length(config, len(corpus.tasks))
    num_steps = length.total
    seed = config.train.seed
    note_doing(console, "loading the model")
    model = build_model(
        config.model,
        num_ids=corpus.num_ids,
        seed=seed,
        folder=folder,
        lora=config.lora,
        takes_pictures=corpus.has_pictures or (held is not None and held.has_pictures),
    )
    note_doing(console, "preparing the first step")
    note_compiling(console, fill_forest)
    compute = compute_options(config.model, config.train, num_steps)
    if group.rank == 0:
        compute = with_costs(compute, config.train.sharing, model, config.run.dir)
    # Costs that one rank has measured, so that all share trees alike.
    compute = group.gather(compute)[0]
    options = loop_options(config, compute)
    teacher = None
    if teacher_folder := find_model(config.teacher, config_dir, setting="teacher.path"):
        teacher = load_teacher(teacher_folder, config.model, tokenizer=corpus.tokenizer)
    optim = optim_options(config.train, num_steps)
    # Before its weights are sharded.
    run_identity = identity(config, corpus, model)
    if group.size > 1:
        shard_model(model)
    loop = SftLoop(model, corpus.tasks, optim=optim, options=options, teacher=teacher, group=group)
    checkpoints = CheckpointStore(
        folder=config.run.dir / CHECKPOINTS_FOLDER,
        identity=run_identity,
        keep=config.run.keep,
        card=partial(model_card, config.run.dir, has_tokenizer=corpus.tokenizer is not None),
        tokenizer=corpus.tokenizer,
        group=group,
    )
    with printed_warnings(console):
        opened = open_run(config.run.dir, loop, checkpoints)
    sinks: list[Sink] = []
    if group.rank == 0:
        write_settings(config, config.run, num_steps)
        log_start(config.run.dir, opened, model, group.size)
        if opened.is_new:
            write_samples(config.run.dir, corpus.tasks)
        _announce(console, config, corpus, model, opened, length)
        with printed_warnings(console):
            sinks = open_sinks(config.metrics, config.run.dir, opened, config.model_dump(mode="json"))
    evaluation = None
    if held is not None:
        evaluation = Evaluation(
            measure=HeldOutLoss(model, held.tasks, compute=compute, layout=config.train.layout, group=group),
            every=config.eval.every,
            knows_first=group.gather(knows_first(config.run.dir))[0],
        )
    interruption = Interruption(group)
    with Metrics(sinks) as metrics:
        steps = run_steps(
            loop,
            num_steps=num_steps,
            save_every=config.run.save_interval,
            checkpoints=checkpoints,
            metrics=metrics,
            evaluation=evaluation,
            interruption=interruption,
            on_saved=SavingNote(console),
        )
        title = str(config.run.dir)
        with (
            RunDisplay(title=title, num_steps=num_steps, first_step=opened.step, console=console) as display,
            deferred_to(interruption, console.print),
        ):
            loop.on_progress = interruption.checked(display.show_phase)
            if evaluation is not None:
                evaluation.on_measured = display.show_evaluation
            reports = _show_each(steps, SftProgress(display), console, corpus)
    return _summary(config, corpus, model, opened, reports)


def _show_each(
    steps: Iterator[StepReport], progress: SftProgress, console: Console, corpus: Corpus
) -> list[StepReport]:
    reports = []
    for report in steps:
        # What a step has read of the data is not needed before the next epoch.
        corpus.release()
        for note in report.update.notes:
            console.print(note, soft_wrap=True)
        progress.show(report)
        reports.append(report)
    return reports


def _announce(
    console: Console, config: SftConfig, corpus: Corpus, model: PreTrainedModel, opened: Opened, length: RunLength
) -> None:
    lengths = [sequence.size for task in corpus.tasks for sequence in task.sequences]
    budget = budget_note("train.max_batch_tokens", config.train.max_batch_tokens, max(lengths))
    for note in (*corpus.notes, budget, length.short_note() if opened.is_new else None):
        if note is not None:
            console.print(note, soft_wrap=True)
    device = next(model.parameters()).device
    console.print(
        f"{len(corpus.tasks)} tasks, {sum(lengths):,} flat tokens; {parameters_in_words(model)} on {device} in "
        f"{config.model.dtype}; {length.in_words} into {config.run.dir}",
        soft_wrap=True,
    )
    autocast = compute_options(config.model, config.train).autocast
    console.print(attention_in_words(model, autocast), soft_wrap=True)
    if not opened.is_new:
        console.print(length.resume_note(config.run.dir, opened.step), soft_wrap=True)


def _summary(
    config: SftConfig, corpus: Corpus, model: PreTrainedModel, opened: Opened, reports: Sequence[StepReport]
) -> SftSummary:
    total = totals(reports)
    last_step = reports[-1].step if reports else opened.step
    return SftSummary(
        run_dir=str(config.run.dir),
        data=corpus.source,
        num_tasks=len(corpus.tasks),
        num_parameters=model.num_parameters(),
        resumed_from_step=opened.resume_step,
        num_steps=last_step,
        first_loss=total.first_loss,
        last_loss=total.last_loss,
        seconds=total.seconds,
        flat_tokens=total.flat_tokens,
        unique_tokens=total.unique_tokens,
        sharing=total.sharing,
        num_micro_batches=total.num_micro_batches,
        flat_tokens_per_s=total.per_second(total.flat_tokens),
        unique_tokens_per_s=total.per_second(total.unique_tokens),
        checkpoint=str(checkpoint_path(config.run.dir / CHECKPOINTS_FOLDER, last_step)),
    )
