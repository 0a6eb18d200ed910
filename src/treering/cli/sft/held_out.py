"""The [eval] section of `treering sft`: which tasks are held out."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from treering.cli.corpus import Corpus, load_corpus
from treering.config import SftConfig
from treering.train.loop.batches import TrainingTask


def split_corpus(
    config: SftConfig, corpus: Corpus, *, config_dir: Path, model: Path | None
) -> tuple[Corpus, Corpus | None]:
    """The corpus to train on, and the one to evaluate; None if nothing is held out.

    A task is held out with all of its trajectories.

    Args:
        config: of the run.
        corpus: all of [data].
        config_dir: folder of the configuration file.
        model: see `load_corpus`.

    Raises:
        InputError: a bad file, or a share of which one side is empty.
    """
    section = config.eval
    if not section.is_set:
        return corpus, None
    trained = corpus
    if section.files:
        held = read_files(config, config_dir=config_dir, model=model)
    else:
        trained, held = _shared_out(config, corpus)
    return replace(trained, notes=(*trained.notes, *_notes(held, trained))), held


def read_files(config: SftConfig, *, config_dir: Path, model: Path | None) -> Corpus:
    """The tasks of `eval.files`; arguments as above."""
    data = config.data.model_copy(update={"files": config.eval.files, "max_tasks": None})
    held = load_corpus(data, config_dir=config_dir, model=model)
    return replace(held, tasks=held.tasks[: config.eval.max_tasks])


def _shared_out(config: SftConfig, corpus: Corpus) -> tuple[Corpus, Corpus]:
    section = config.eval
    both = list(zip(corpus.tasks, section.held_out([task.task_id for task in corpus.tasks], "tasks"), strict=True))
    trained = replace(corpus, tasks=tuple(task for task, is_held in both if not is_held))
    held = tuple(task for task, is_held in both if is_held)
    return trained, replace(corpus, tasks=held[: section.max_tasks], notes=())


def _notes(held: Corpus, trained: Corpus) -> list[str]:
    """What a user should know of the two parts."""
    known = {digest for task in trained.tasks for digest in _digests(task)}
    trained.release()
    common = [task for task in held.tasks if not known.isdisjoint(_digests(task))]
    notes = [*held.notes, f"{len(held.tasks)} held-out tasks are evaluated"]
    if common:
        notes.append(
            f"{len(common)} of them have a trajectory that is trained on too, such as task {common[0].task_id!r}"
        )
    return notes


def _digests(task: TrainingTask) -> Iterator[bytes]:
    """Of each sequence, by its tokens and pictures."""
    for sequence, pictures in zip_longest(task.sequences, task.pictures, fillvalue=()):
        digest = hashlib.blake2b(np.ascontiguousarray(sequence).data, digest_size=16)
        for placed in pictures:
            digest.update(placed.picture.digest)
        yield digest.digest()
