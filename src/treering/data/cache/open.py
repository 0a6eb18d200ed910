"""Open a trajectory file as token arrays, from the cache, or built and cached for the next start.

The key of a cache is a digest of everything that its arrays depend on: contents, settings and code.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date as Date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from treering.data.cache.build_dataset import OnBuild, ReadOptions, build, check_no_pairs
from treering.data.cache.dataset import DatasetFacts, TokenDataset
from treering.data.cache.folder import drafted, publish, remove
from treering.data.formats.arrow import missing_parts
from treering.data.formats.containers import source_files
from treering.data.image import ImageSource, OpenImage
from treering.data.rendering.renderer import Renderer
from treering.errors import DataWarning, InputError, StateError
from treering.extras import versions_of
from treering.files.writing import read_facts

CACHE_VERSION = 5
"""Version of the arrays and their files."""

_TOKENIZER_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
_WRITES_DATE = b"strftime_now"
_CODE = Path(__file__).parents[1]
_PACKAGES = ("tokenizers", "jinja2", "pyarrow", "pillow", "transformers")


def cache_key(path: Path, renderer: Renderer, options: Mapping[str, Any]) -> str:
    """Return the key of the arrays of a path: a SHA-256 of its contents, the tokenizer's files and all settings.

    The contents are read, because time stamps can lie. The key also covers the code of `treering.data` and the versions
    of the packages that render.

    Example: a copy of a file under another name with the same ending has the same key.
    """
    versions = versions_of(_PACKAGES)
    facts = {
        "version": CACHE_VERSION,
        "code": [code_digest(_CODE), np.__version__, *(versions.get(package, "") for package in _PACKAGES)],
        "contents": [[_name(each, path), _digest_of([each])] for each in source_files(path)],
        # A missing part causes a warning or an error.
        "missing": missing_parts(path),
        "template": renderer.template,
        **_tokenizer(renderer),
        **options,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _name(file: Path, path: Path) -> str:
    """Return the part of a file's name that decides how it is read."""
    return str(file.relative_to(path)) if file != path else "".join(file.suffixes[-2:]).lower()


def _tokenizer(renderer: Renderer) -> dict[str, Any]:
    if renderer.tokenizer is None:
        return {"tokenizer": None}
    folder = renderer.tokenizer
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    writes_date = any(_WRITES_DATE in file.read_bytes() for file in files)
    return {
        "tokenizer": [[str(file.relative_to(folder)), _digest_of([file])] for file in files],
        "date": str(renderer.date or Date.today()) if writes_date else None,
    }


@cache
def code_digest(folder: Path) -> str:
    """Return the SHA-256 of the code in a folder, for caches that depend on it."""
    return _digest_of(sorted(folder.rglob("*.py")))


def _digest_of(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def open_dataset(
    path: str | os.PathLike[str],
    renderer: Renderer,
    options: ReadOptions | None = None,
    *,
    folder: Path | None,
    on_progress: OnBuild | None = None,
    num_workers: int = 0,
) -> TokenDataset:
    """Return the rendered trajectories of a file or folder, in bounded memory.

    The first call reads, renders and writes the file in one pass; later calls check the checksums and map the arrays.
    The arrays are the same without a cache.

    Args:
        path: path that `read_trajectories` reads.
        renderer: makes tokens and masks.
        options: how records are read.
        folder: folder of caches, see `cache_folder`; None disables the cache.
        on_progress: called with the progress of a build several times a second.
        num_workers: number of processes that render a large file; see `num_workers_here`. A script that sets it needs
            `if __name__ == "__main__":`, because each process imports it.

    Raises:
        InputError: as `read_trajectories` and `Renderer.render`; the file was changed while it was read.
        StateError: a rendering process was killed; the folder of temporary files cannot be written either.
        MissingExtraError: a package is missing.

    Warns:
        DataWarning: their warnings, also from the cache; a cache that is damaged or cannot be written.

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
    """Open the arrays of a file from the cache, or from the folder into which `make` writes them.

    The key covers the file, the renderer's tokenizer and template, and `options`, values in JSON. `make` writes with an
    `ArrayWriter` and may be called twice. A file that `may_grow` meanwhile is not cached, and none without a folder.
    """
    # Taken before the key is computed, so that the cache never has other contents than its key.
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
    # Facts from the cache have the paths of the call that built it.
    dataset.facts = dataset.facts.named(str(file), None if renderer.tokenizer is None else str(renderer.tokenizer))
    for warning in dataset.facts.warnings:
        warnings.warn(warning, DataWarning, stacklevel=3)
    return dataset


@contextmanager
def unchanged(file: Path) -> Iterator[None]:
    """Check at the end of the block that a file or folder of records has not changed."""
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
        # The reader reports what is wrong with the file.
        return None


def _stamps(path: Path) -> list[tuple[str, int, int, int]]:
    """Return the name, inode, size and modification time of each file."""
    found = [(str(file), file.stat()) for file in source_files(path) if file.is_file()]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _kept(target: Path, file: Path, renderer: Renderer) -> TokenDataset | None:
    if not os.path.lexists(target):
        return None
    try:
        facts = read_facts(target)
        known = DatasetFacts(**facts)
        if not _has_images(file, known.image_files):
            remove(target)
            return None
        return TokenDataset(target, known, _opener(renderer))
    except (StateError, OSError, ValueError, TypeError) as error:
        warnings.warn(f"{file}: its cache cannot be used and is made again ({error})", DataWarning, stacklevel=3)
        return None


def _has_images(file: Path, digests: Mapping[str, str]) -> bool:
    """Return whether local images are unchanged; the key covers only the data file."""
    folder = file if file.is_dir() else file.parent
    try:
        sources = {name: ImageSource(folder=folder, file=name) for name in digests}
        return all(hashlib.sha256(sources[name].read()).hexdigest() == digest for name, digest in digests.items())
    except InputError:
        # The build reports what is wrong with the image.
        return False


def _opener(renderer: Renderer) -> OpenImage | None:
    return None if renderer.tokenizer is None else renderer.processor.values


def _built(target: Path, file: Path, renderer: Renderer, make: Callable[[Path], DatasetFacts]) -> TokenDataset:
    try:
        with drafted(target.parent) as draft:
            facts = make(draft)
            # Mapped first, because other processes may replace or remove a published cache.
            dataset = TokenDataset(draft, facts, _opener(renderer))
            publish(draft, target, asdict(facts))
            return dataset
    except OSError as error:
        # Errors of the source file are InputErrors.
        reason = error.strerror or error
        warnings.warn(f"{file}: {target.parent} keeps no cache of it ({reason})", DataWarning, stacklevel=3)
        return _in_passing(renderer, make)


def _in_passing(renderer: Renderer, make: Callable[[Path], DatasetFacts]) -> TokenDataset:
    try:
        # Mapped files stay readable after their deletion.
        with tempfile.TemporaryDirectory(prefix="treering-", ignore_cleanup_errors=True) as draft:
            return TokenDataset(Path(draft), make(Path(draft)), _opener(renderer))
    except OSError as error:
        raise StateError(
            f"tokens are kept in the folder of temporary files while they are used, and it cannot be written "
            f"({error.strerror or error}); free some space, or name another folder by TMPDIR"
        ) from error
