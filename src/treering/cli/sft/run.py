"""Runs `treering sft`: builds data, model and loop from a configuration, and trains."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from treering.cli.corpus import Corpus, load_corpus
from treering.cli.data_files import show_build
from treering.cli.display.log_console import note_doing
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.hub import find_model
from treering.cli.models import build_model, load_teacher
from treering.cli.run_notes import RunLength, budget_note, run_length
from treering.cli.session import Session, agreed, agreed_compute, checkpoint_store, owning
from treering.cli.settings import optim_options
from treering.cli.sft.held_out import split_corpus
from treering.cli.sft.samples import write_samples
from treering.cli.sft.settings import identity, loop_options, with_step_size
from treering.cli.sft.summary import SftSummary, summary_of
from treering.config import SftConfig
from treering.ranks.group import RankGroup
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.held_out import HeldOutLoss
from treering.train.loop.ranks import shard_model
from treering.train.loop.resumable import StepReport
from treering.train.loop.run import Opened
from treering.train.loop.sft import SftLoop
from treering.tree.build import fill_forest


def train(config: SftConfig, *, config_dir: Path, console: Console) -> SftSummary:
    """Trains as a configuration in the folder `config_dir` says, or resumes the run that its run folder holds."""
    with owning(config.run.dir) as group:
        return _train(agreed(config, config_dir, group), config_dir, console, group)


def _train(config: SftConfig, config_dir: Path, console: Console, group: RankGroup) -> SftSummary:
    folder = find_model(config.model, config_dir)
    corpus, held = _read(config, config_dir, folder, console)
    config = with_step_size(config, len(corpus.tasks), group.size)
    length = run_length(config, len(corpus.tasks))
    note_doing(console, "loading the model")
    model = build_model(
        config.model,
        num_ids=corpus.num_ids,
        seed=config.train.seed,
        folder=folder,
        lora=config.lora,
        takes_pictures=corpus.has_pictures or (held is not None and held.has_pictures),
    )
    note_doing(console, "preparing the first step")
    note_compiling(console, fill_forest)
    compute = agreed_compute(config, config.train, model, group, length.total)
    # The identity is that of weights before they are sharded.
    checkpoints = checkpoint_store(config, model, identity(config, corpus, model), corpus.tokenizer, group)
    loop = _make_loop(config, config_dir, corpus, model, compute, length.total, group)
    session = Session(config=config, loop=loop, checkpoints=checkpoints, num_steps=length.total, console=console)
    opened = session.open()
    if group.rank == 0:
        _announce(session, config, corpus, model, opened, length)
    measure = None
    if held is not None:
        measure = HeldOutLoss(model, held.tasks, compute=compute, layout=config.train.layout, group=group)
    evaluation = session.evaluation(measure)
    with session.metrics(opened) as metrics:
        steps = session.steps(metrics, evaluation)
        notes_of = partial(_notes_of, corpus)
        reports = session.show(steps, first_step=opened.step, evaluation=evaluation, notes_of=notes_of)
    return summary_of(config, corpus, model, opened, reports)


def _read(config: SftConfig, config_dir: Path, model: Path | None, console: Console) -> tuple[Corpus, Corpus | None]:
    """What is trained on, and what is held out."""
    note_doing(console, "reading the data")
    with WorkProgress(console) as reading:
        corpus = load_corpus(config.data, config_dir=config_dir, model=model, on_build=partial(show_build, reading))
    return split_corpus(config, corpus, config_dir=config_dir, model=model)


def _announce(
    session: Session[StepReport],
    config: SftConfig,
    corpus: Corpus,
    model: PreTrainedModel,
    opened: Opened,
    length: RunLength,
) -> None:
    """Says what is trained, and keeps samples of a new run's data."""
    lengths = [sequence.size for task in corpus.tasks for sequence in task.sequences]
    session.say(*corpus.notes, budget_note("train.max_batch_tokens", config.train.max_batch_tokens, max(lengths)))
    what = f"{len(corpus.tasks)} tasks, {sum(lengths):,} flat tokens; {{}}; {length.in_words}"
    session.announce(opened, length, model, what, session.checkpoints.group.size)
    if opened.is_new:
        write_samples(config.run.dir, corpus.tasks)


def _notes_of(corpus: Corpus, report: StepReport) -> Sequence[str]:
    # What a step has read of the data is not needed before the next epoch.
    corpus.release()
    return report.update.notes


def _make_loop(
    config: SftConfig,
    config_dir: Path,
    corpus: Corpus,
    model: PreTrainedModel,
    compute: ComputeOptions,
    num_steps: int,
    group: RankGroup,
) -> SftLoop:
    teacher = None
    if folder := find_model(config.teacher, config_dir, setting="teacher.path"):
        teacher = load_teacher(folder, config.model, tokenizer=corpus.tokenizer)
    if group.size > 1:
        shard_model(model)
    optim, options = optim_options(config.train, num_steps), loop_options(config, compute)
    return SftLoop(model, corpus.tasks, optim=optim, options=options, teacher=teacher, group=group)
