"""Run `treering sft` from its settings to its summary: data, model, loop, steps."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from treering.cli.corpus import Corpus, load_corpus
from treering.cli.data_files import show_build
from treering.cli.display import WorkProgress, facts_table, note_compiling
from treering.cli.hub import find_model
from treering.cli.models import build_model, find_teacher, tokenizer_note
from treering.cli.session import (
    RunLength,
    Scalar,
    TrainingRun,
    checkpoint_store,
    join_run,
    steps_cell,
    training_identity,
)
from treering.config import SftConfig
from treering.data import Trajectory, write_trajectories
from treering.errors import plural
from treering.ranks.group import RankGroup
from treering.report.rollout_views import MAX_DRAWN_PROMPTS, MAX_DRAWN_TOKENS, SAMPLES_FILE
from treering.report.run_data import held_out
from treering.train.loop.batches import TrainingTask, step_size
from treering.train.loop.checkpoint import NAME, StepReport
from treering.train.loop.compute import shard_model
from treering.train.loop.held_out import HeldOutLoss
from treering.train.loop.sft_loop import SftLoop
from treering.tree.radix import fill_forest


def write_samples(folder: Path, tasks: Sequence[TrainingTask]) -> None:
    """Write the first tasks without images to `samples.jsonl`: as many as a report draws, and at least one.

    Writes no file if every task has images.

    Raises:
        InputError: the disk is full.

    Example: of tasks with 30,000 tokens each, only the first is written.
    """
    num_tokens, chosen = 0, list[Trajectory]()
    # Token files cannot hold images; `treering inspect --html` shows them.
    for task in [task for task in tasks if not task.images][:MAX_DRAWN_PROMPTS]:
        num_tokens += sum(sequence.size for sequence in task.sequences)
        if chosen and num_tokens > MAX_DRAWN_TOKENS:
            break
        chosen += [
            Trajectory(task_id=task.task_id, tokens=tokens, loss_mask=mask, epoch=0)
            for tokens, mask in zip(task.sequences, task.loss_masks, strict=True)
        ]
    if chosen:
        write_trajectories(folder / SAMPLES_FILE, chosen)


def split_corpus(
    config: SftConfig, corpus: Corpus, *, config_dir: Path, model: Path | None
) -> tuple[Corpus, Corpus | None]:
    """Return the corpus to train on, and the held-out one; None if nothing is held out.

    All trajectories of a task are on the same side.

    Args:
        config: configuration of the run.
        corpus: all data of section [data].
        config_dir: folder of the configuration file.
        model: folder of the model, whose tokenizer is the default.

    Raises:
        InputError: a bad file, or `eval.share` with fewer than two tasks.
    """
    section = config.eval
    if not section.is_set:
        return corpus, None
    trained = corpus
    if section.files:
        held = read_files(config, config_dir=config_dir, model=model)
    else:
        ids = [task.task_id for task in corpus.tasks]
        both = list(zip(corpus.tasks, section.held_out(ids, "tasks"), strict=True))
        notes = (*corpus.notes, *section.share_notes(ids, "tasks"))
        trained = replace(corpus, tasks=tuple(task for task, is_held in both if not is_held), notes=notes)
        held = replace(corpus, tasks=tuple(task for task, is_held in both if is_held), notes=())
    return replace(trained, notes=(*trained.notes, *_notes(held, trained))), held


def read_files(config: SftConfig, *, config_dir: Path, model: Path | None) -> Corpus:
    """Return the tasks of `eval.files`; the arguments are those of `split_corpus`."""
    data = config.data.model_copy(update={"files": config.eval.files, "max_tasks": None})
    return load_corpus(data, config_dir=config_dir, model=model)


def _notes(held: Corpus, trained: Corpus) -> list[str]:
    known = {digest for task in trained.tasks for digest in _digests(task)}
    trained.release()
    common = [task for task in held.tasks if not known.isdisjoint(_digests(task))]
    notes = [*held.notes, plural(len(held.tasks), "held-out task is evaluated", "held-out tasks are evaluated")]
    if common:
        have = "has" if len(common) == 1 else "have"
        notes.append(
            f"{len(common)} of them {have} a trajectory that is also trained on, such as task {common[0].task_id!r}"
        )
    return notes


def _digests(task: TrainingTask) -> Iterator[bytes]:
    for sequence, images in zip_longest(task.sequences, task.images, fillvalue=()):
        digest = hashlib.blake2b(np.ascontiguousarray(sequence).data, digest_size=16)
        for placed in images:
            digest.update(placed.image.digest)
        yield digest.digest()


def with_step_size(config: SftConfig, num_tasks: int, num_ranks: int) -> SftConfig:
    """Return the configuration with trees_per_step resolved to a number."""
    if config.train.trees_per_step != "auto":
        return config
    size = step_size("auto", num_tasks, num_ranks)
    return config.model_copy(update={"train": config.train.changed(trees_per_step=size)})


def identity(config: SftConfig, corpus: Corpus, model: PreTrainedModel) -> dict[str, Scalar]:
    """Return what a resumed run must share with the original one: model, data, optimization, layout."""
    data: dict[str, Scalar] = {}
    for number, (name, digest) in enumerate(corpus.digests.items()):
        data |= {f"data.files[{number}]": digest, f"data.files[{number}]{NAME}": name} if name else {"data": digest}
    return {**training_identity(config, model), **data}


def summary_of(
    run: TrainingRun[StepReport], corpus: Corpus, reports: Sequence[StepReport]
) -> tuple[dict[str, Any], Table]:
    """Sum up the steps of a call: as JSON, and as a table for the terminal."""
    flat = sum(report.update.num_branch_tokens for report in reports)
    unique = sum(report.update.num_tokens for report in reports)
    seconds = sum(report.seconds for report in reports)
    first, last = (reports[end].update.loss if reports else None for end in (0, -1))
    summary = {
        **run.summary_of(reports),
        "data": corpus.source,
        "num_tasks": len(corpus.tasks),
        "first_loss": first,
        "last_loss": last,
        "seconds": seconds,
        "flat_tokens": flat,
        "unique_tokens": unique,
        "sharing": 1.0 - unique / flat if flat else 0.0,
        "num_micro_batches": sum(report.update.num_micro_batches for report in reports),
        "flat_tokens_per_s": flat / seconds if seconds else 0.0,
        "unique_tokens_per_s": unique / seconds if seconds else 0.0,
    }
    rows = {
        "data": f"{corpus.source}, {len(corpus.tasks)} tasks",
        "model": f"{summary['num_parameters']:,} parameters",
        "steps": steps_cell(summary),
        "loss": "-" if first is None else f"{first:.3f} -> {last:.3f}",
        **held_out(summary["evaluations"]),
        "seconds": f"{seconds:,.1f}",
        "flat tokens": f"{flat:,} ({summary['flat_tokens_per_s']:,.0f} per second)",
        "unique tokens": f"{unique:,} ({summary['unique_tokens_per_s']:,.0f} per second)",
        "sharing": f"{summary['sharing']:.3f}",
        "checkpoint": summary["checkpoint"],
    }
    return summary, facts_table(f"treering sft: {summary['run_dir']}", rows)


def train(config: SftConfig, *, config_dir: Path, console: Console) -> tuple[dict[str, Any], Table]:
    """Start or resume the run of a configuration, whose file is in the folder `config_dir`; return its summary."""
    with join_run(config, config_dir) as (started, rank_group):
        return _train(started, config_dir, console, rank_group)


def _train(
    config: SftConfig, config_dir: Path, console: Console, rank_group: RankGroup
) -> tuple[dict[str, Any], Table]:
    folder = find_model(config.model, config_dir)
    console.print("reading the data")
    with WorkProgress(console) as reading:
        corpus = load_corpus(config.data, config_dir=config_dir, model=folder, on_build=partial(show_build, reading))
    corpus, held = split_corpus(config, corpus, config_dir=config_dir, model=folder)
    config = with_step_size(config, len(corpus.tasks), rank_group.size)
    length = RunLength(config=config, num_tasks=len(corpus.tasks))
    console.print("loading the model")
    model = build_model(
        config.model,
        num_ids=corpus.num_ids,
        seed=config.train.seed,
        folder=folder,
        lora=config.lora,
        takes_images=corpus.has_images or (held is not None and held.has_images),
    )
    doubt = tokenizer_note(model, folder, corpus.tokenizer)
    console.print("preparing the first step")
    note_compiling(console, fill_forest)
    # The identity needs the weights before they are sharded.
    checkpoints = checkpoint_store(config, model, identity(config, corpus, model), corpus, rank_group)
    teacher = find_teacher(config.teacher, config.model, config_dir, tokenizer=corpus.tokenizer)
    if rank_group.size > 1:
        shard_model(model, config.model.autocast)
    optim = config.optim.changed(num_steps=length.total)
    loop = SftLoop(model, corpus.tasks, optim=optim, options=config.options, teacher=teacher, rank_group=rank_group)
    run = TrainingRun(config=config, loop=loop, checkpoints=checkpoints, num_steps=length.total, console=console)
    run.open()
    lengths = [sequence.size for task in corpus.tasks for sequence in task.sequences]
    size = min(length.step_tasks.trees_per_step, len(corpus.tasks))
    steps = f"{plural(length.total, 'step')} of {plural(size, 'task')}"
    what = f"{plural(len(corpus.tasks), 'task')}, {sum(lengths):,} flat tokens; {{}}; {steps}"
    run.announce(length, model, what, notes=[doubt, *corpus.notes], longest=max(lengths))
    if rank_group.rank == 0 and run.opened.is_new:
        write_samples(config.run.dir, corpus.tasks)
    measure = None
    if held is not None:
        measure = HeldOutLoss(
            model, held.tasks, compute=config.options, layout=config.train.layout, rank_group=rank_group
        )
    with run.metrics() as metrics:
        # Free the data that a step has read: it is not needed before the next epoch.
        run.prepare(metrics, measure, on_step=lambda report: corpus.release())
        reports = run.run_to_end(lambda reports: reports[-1].update.notes)
    return summary_of(run, corpus, reports)
