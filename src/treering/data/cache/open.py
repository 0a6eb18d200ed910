"""Opens a trajectory file as arrays of tokens: out of the cache, or built and kept there for the next start."""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from treering.data.cache.build import OnBuild, ReadOptions, build, check_no_pairs
from treering.data.cache.dataset import DatasetFacts, TokenDataset
from treering.data.cache.folder import drafted, publish, remove
from treering.data.cache.key import cache_key
from treering.data.formats.containers import source_files
from treering.data.pictures.source import PictureSource
from treering.data.pictures.stored import OpenPicture
from treering.data.rendering.renderer import Renderer
from treering.errors import DataWarning, InputError, StateError
from treering.files.atomic import read_facts


def open_dataset(
    path: str | os.PathLike[str],
    renderer: Renderer,
    options: ReadOptions | None = None,
    *,
    folder: Path | None,
    on_progress: OnBuild | None = None,
    num_workers: int = 0,
) -> TokenDataset:
    """The rendered trajectories of a file or folder, in bounded memory.

    The first time they are read, rendered and written in one pass; then the arrays are mapped as they are, after their
    checksums. With and without a cache it is the same pass and the same arrays.

    Args:
        path: what `read_trajectories` reads.
        renderer: makes tokens and masks.
        options: how records are read.
        folder: of caches, see `cache_folder`; None keeps nothing.
        on_progress: told of a build some times a second.
        num_workers: processes that render a large file, to the same arrays; see `num_workers_here`. A script that sets
            it needs `if __name__ == "__main__":`, as it is imported by each.

    Raises:
        InputError: as `read_trajectories` and `Renderer.render`; the file was changed while it was read.
        StateError: a process that renders was killed; the folder of temporary files cannot be written either.
        MissingExtraError: a package is missing.

    Warns:
        DataWarning: what they warn of, also out of the cache; a cache that is damaged or cannot be written.

    Example: `open_dataset("set.jsonl", Renderer(tokenizer=folder), folder=cache_folder()).task(0)[0].tokens`.
    """
    file, options = Path(path), options or ReadOptions()

    def make(draft: Path) -> DatasetFacts:
        return build(draft, file, renderer, options, on_progress, num_workers)

    key = asdict(replace(options, refuses_pairs=False))
    dataset = open_built(file, renderer, key, make, folder=folder, may_grow=options.may_be_torn)
    if options.refuses_pairs:
        check_no_pairs(file, dataset.facts.num_rejected)
    return dataset


def open_built(
    file: Path,
    renderer: Renderer,
    options: Mapping[str, Any],
    make: Callable[[Path], DatasetFacts],
    *,
    folder: Path | None,
    may_grow: bool = False,
) -> TokenDataset:
    """As `open_dataset`, of arrays that `make` writes into a folder where they are not kept.

    Args:
        file: what they are made of.
        renderer: whose tokenizer and template they depend on.
        options: what else they depend on; JSON values.
        make: writes them by an `ArrayWriter`; it may be called twice.
        folder: of caches; None keeps nothing.
        may_grow: the file may change meanwhile, so nothing is kept of it.

    Example: `open_built(file, renderer, {"kind": "prompts"}, make, folder=cache_folder()).tokens(0)`.
    """
    # Before the name is found, so that nothing is kept under the name of other contents.
    before = _stamps(file)

    def checked(draft: Path) -> DatasetFacts:
        facts = make(draft)
        if not may_grow:
            _check_unchanged(file, before)
        return facts

    target = None if folder is None or may_grow else _target(folder, file, renderer, options)
    dataset = None if target is None else _kept(target, file, renderer)
    if dataset is None:
        dataset = _in_passing(renderer, checked) if target is None else _built(target, file, renderer, checked)
    return _said(dataset, file, renderer)


@contextmanager
def unchanged(file: Path) -> Iterator[None]:
    """Refuses a file or folder of records that is written in the block.

    Raises:
        InputError: it was changed.
    """
    before = _stamps(file)
    yield
    _check_unchanged(file, before)


def _check_unchanged(file: Path, before: list[tuple[str, int, int, int]]) -> None:
    if _stamps(file) != before:
        raise InputError(f"{file}: it was changed while it was read; start again when nothing writes it")


def _target(folder: Path, file: Path, renderer: Renderer, options: Mapping[str, Any]) -> Path | None:
    try:
        return folder / cache_key(file, renderer, options) if file.is_file() or file.is_dir() else None
    except OSError:
        # Reading says what is wrong with the file.
        return None


def _stamps(path: Path) -> list[tuple[str, int, int, int]]:
    """Of each file: name, number, size and time of the last change."""
    found = [(str(file), file.stat()) for file in source_files(path) if file.is_file()]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _kept(target: Path, file: Path, renderer: Renderer) -> TokenDataset | None:
    if not os.path.lexists(target):
        return None
    try:
        facts = read_facts(target)
        known = DatasetFacts(**facts)
        if not _has_pictures(file, known.picture_files):
            remove(target)
            return None
        return TokenDataset(target, known, _opener(renderer))
    except (StateError, OSError, ValueError, TypeError) as error:
        warnings.warn(f"{file}: its cache cannot be used and is made again ({error})", DataWarning, stacklevel=3)
        return None


def _has_pictures(file: Path, digests: Mapping[str, str]) -> bool:
    """Whether local pictures are those that the arrays were made of; the key knows the data file alone."""
    folder = file if file.is_dir() else file.parent
    try:
        sources = {name: PictureSource(folder=folder, file=name) for name in digests}
        return all(hashlib.sha256(sources[name].read()).hexdigest() == digest for name, digest in digests.items())
    except InputError:
        # Building says what is wrong with it.
        return False


def _opener(renderer: Renderer) -> OpenPicture | None:
    return None if renderer.tokenizer is None else renderer.processor.values


def _built(target: Path, file: Path, renderer: Renderer, make: Callable[[Path], DatasetFacts]) -> TokenDataset:
    try:
        with drafted(target.parent) as draft:
            facts = make(draft)
            # Mapped before others can find it, who may replace or clear it.
            dataset = TokenDataset(draft, facts, _opener(renderer))
            publish(draft, target, asdict(facts))
            return dataset
    except OSError as error:
        # What the file itself raises is an InputError.
        reason = error.strerror or error
        warnings.warn(f"{file}: {target.parent} keeps no cache of it ({reason})", DataWarning, stacklevel=3)
        return _in_passing(renderer, make)


def _in_passing(renderer: Renderer, make: Callable[[Path], DatasetFacts]) -> TokenDataset:
    try:
        # What is mapped stays readable.
        with tempfile.TemporaryDirectory(prefix="treering-", ignore_cleanup_errors=True) as draft:
            return TokenDataset(Path(draft), make(Path(draft)), _opener(renderer))
    except OSError as error:
        raise StateError(
            f"tokens are kept in the folder of temporary files while they are used, and it cannot be written "
            f"({error.strerror or error}); free some space, or name another folder by TMPDIR"
        ) from error


def _said(dataset: TokenDataset, file: Path, renderer: Renderer) -> TokenDataset:
    """The dataset with the names of this call in its sentences, after its warnings."""
    named = dataset.facts.named(str(file), None if renderer.tokenizer is None else str(renderer.tokenizer))
    for warning in named.warnings:
        warnings.warn(warning, DataWarning, stacklevel=4)
    dataset.facts = named
    return dataset
