"""Load the data of `treering sft`: the configured files as tokens and masks, or a generated stand-in. No torch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from treering.cli.data_files import OnFile, located, read_file
from treering.cli.hub import find_folder, search_folders
from treering.cli.row_choice import RowChoice
from treering.config.sft_config import DataConfig
from treering.data import (
    DATA_VARIABLE,
    AgentSpec,
    Renderer,
    data_folder,
    generate_trajectories,
    render,
)
from treering.data.cache.build_dataset import ReadOptions
from treering.data.cache.dataset import TokenDataset
from treering.data.formats.reader import find_location
from treering.errors import ConfigError, InputError, plural
from treering.rl.tasks.text_tokens import StopToken, TextTokens, find_stop_tokens
from treering.train.loop.batches import TrainingTask, group_by_task

_RELEASE_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Tasks to train on."""

    tasks: tuple[TrainingTask, ...]
    """Tasks with at least one trained token, in file order."""
    num_ids: int
    """Vocabulary that the model needs: the tokenizer's, or one more than the largest id."""
    source: Literal["files", "generated"]
    """Origin of the tasks."""
    notes: tuple[str, ...]
    """Notes for the user about the data."""
    tokenizer: Path | None
    """Folder of the tokenizer that made the ids; None without one."""
    renderer: Renderer | None = None
    """Renderer of chats; None without chats."""
    stop_tokens: tuple[int, ...] = ()
    """Ids that end turns and texts."""
    datasets: tuple[TokenDataset, ...] = ()
    """Datasets of which the tasks are views."""

    def release(self) -> None:
        """Release the memory of tokens read so far; they are read again when needed."""
        for dataset in self.datasets:
            dataset.release()

    @property
    def has_images(self) -> bool:
        """Whether any sequence has an image."""
        return any(task.images for task in self.tasks)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of every token, mask and image by file; equal only for equal training data."""
        totals: dict[str, Any] = {}
        num_read = 0
        for task in self.tasks:
            total = totals.setdefault(task.source, hashlib.sha256())
            for tokens, mask in zip(task.sequences, task.loss_masks, strict=True):
                total.update(f"{task.task_id!r} {tokens.size}\n".encode())
                total.update(np.ascontiguousarray(tokens, "<i4").data)
                total.update(np.ascontiguousarray(mask).view(np.uint8).data)
                num_read += tokens.size
            for placed in (one for sequence in task.images for one in sequence):
                total.update(f"{placed.start} ".encode() + placed.image.digest)
            if num_read > _RELEASE_TOKENS:
                self.release()
                num_read = 0
        self.release()
        return {source: total.hexdigest() for source, total in totals.items()}


def load_corpus(
    config: DataConfig,
    *,
    config_dir: Path,
    model: Path | None = None,
    on_build: OnFile | None = None,
) -> Corpus:
    """Read and render the configured tasks, or generate the stand-in.

    Args:
        config: the [data] section.
        config_dir: folder of the configuration file.
        model: folder of the model; its tokenizer reads messages if the section names none.
        on_build: called with the name of each file and the progress of reading it.

    Raises:
        InputError: a file is missing or bad, or no task has a trained token.
    """
    chosen = RowChoice(config)
    corpus = _load(config, chosen, config_dir, model, on_build)
    if not corpus.tasks:
        raise InputError(f"[data] has no trajectory to train: {'; '.join(chosen.losses())}; change these settings")
    trained = tuple(task for task in corpus.tasks if task.num_trained_tokens)
    corpus.release()
    if not trained:
        why = "; give assistant turns or loss masks"
        if chosen.num_untrained:
            why = f": {'; '.join(chosen.losses())}; raise it, or use a model with more positions"
        raise InputError(
            f"training needs a trained token, but {plural(len(corpus.tasks), 'task has', 'tasks have')} none{why}"
        )
    left_out = len(corpus.tasks) - len(trained)
    note = plural(left_out, "task without a trained token is dropped", "tasks without a trained token are dropped")
    notes = (note,) if left_out else ()
    return replace(corpus, tasks=trained, notes=corpus.notes + notes)


def _load(
    config: DataConfig, chosen: RowChoice, config_dir: Path, model: Path | None, on_build: OnFile | None
) -> Corpus:
    if config.source == "generated":
        return _generate(config, chosen, notes=())
    if config.source == "files":
        return _read(config, chosen, search_folders(config_dir), model, on_build)
    folder = data_folder()
    if folder is None:
        missing = f"no real data here ({DATA_VARIABLE} names no folder): training on generated data instead"
        return _generate(config, chosen, notes=(missing,))
    return _read(config, chosen, [folder], model, on_build)


def _read(
    config: DataConfig, chosen: RowChoice, folders: Sequence[Path], model: Path | None, on_build: OnFile | None
) -> Corpus:
    # Files of token ids need no tokenizer.
    tokenizer = model if model is not None and (model / "tokenizer.json").is_file() else None
    num_ids = 0
    if config.tokenizer is not None:
        tokenizer = find_folder(config.tokenizer, folders, setting="data.tokenizer", wanted="tokenizer")
        num_ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    renderer = Renderer(tokenizer=tokenizer, template=config.template, date=config.date)
    options = ReadOptions(format=config.format, failed=config.failed, refuses_pairs=True)
    tasks: list[TrainingTask] = []
    datasets: list[TokenDataset] = []
    notes: list[str] = []
    for path in (each for named in config.files for each in located(named, folders)):
        on_progress = None if on_build is None else partial(on_build, path.name)
        dataset = read_file(path, renderer, options, on_progress=on_progress)
        if (same := next((other for other in datasets if _are_equal(dataset, other)), None)) is not None:
            notes.append(f"{path} and {same.facts.source} hold the same data, so it is trained twice; name one of them")
        # Each file numbers its own tasks, so equal ids in two files are two tasks.
        kept = range(min(dataset.num_tasks, config.max_tasks or dataset.num_tasks))
        location_of = partial(find_location, path, config.format, failed=config.failed)
        tasks += [
            task for number in kept for task in group_by_task(chosen.rows(dataset.task(number), location_of), path.name)
        ]
        num_ids = max(num_ids, 1 + max(dataset.largest_id(number) for number in kept))
        notes += [f"{path.name}: {note}" for note in dataset.facts.notes]
        datasets.append(dataset)
    if form := next((dataset.facts.form for dataset in datasets if dataset.facts.form), None):
        notes.insert(0, form)
    stops = () if tokenizer is None else _stops(tokenizer, renderer, model)
    if form is not None and not renderer.turn_ends:
        notes.append(
            "warning: chats end turns with ordinary text, where `generate` does not stop: give it stop_strings, "
            "or train under a chat template that ends turns with eos_token"
        )
    elif stops:
        notes.append(f"turns end with {', '.join(map(str, stops))}, at which `generate` stops in checkpoints")
    notes += chosen.notes()
    return Corpus(
        tasks=tuple(tasks),
        num_ids=num_ids,
        source="files",
        notes=tuple(notes),
        tokenizer=tokenizer,
        renderer=renderer if form else None,
        stop_tokens=tuple(stop.token_id for stop in stops),
        datasets=tuple(datasets),
    )


def _stops(tokenizer: Path, renderer: Renderer, model: Path | None) -> tuple[StopToken, ...]:
    """Return what ends turns; rows of token ids count as chats, which have probably made them."""
    try:
        has_turns = bool(renderer.turn_ends)
    except ConfigError:
        has_turns = False
    return find_stop_tokens(TextTokens(tokenizer), renderer if has_turns else None, model=model)


def _are_equal(left: TokenDataset, right: TokenDataset) -> bool:
    """Return whether two files hold the same rows, for example one file under two names, or compressed."""
    if not np.array_equal(left.lengths, right.lengths):
        return False
    images = [[image.digest for image in dataset.images] for dataset in (left, right)]
    is_same = (
        images[0] == images[1]
        and np.array_equal(left.flat_keys[0], right.flat_keys[0])
        and np.array_equal(left.turn_ends, right.turn_ends)
    )
    left.release()
    right.release()
    return is_same


def _generate(config: DataConfig, chosen: RowChoice, notes: tuple[str, ...]) -> Corpus:
    spec = AgentSpec(num_tasks=config.max_tasks or 32, num_trials=4, vocab_size=512)
    rows = chosen.rows(render(list(generate_trajectories(spec))), lambda index: f"generated trajectory {index}")
    return Corpus(
        tasks=tuple(group_by_task(rows)),
        num_ids=spec.vocab_size,
        source="generated",
        notes=(*notes, *chosen.notes()),
        tokenizer=None,
    )
