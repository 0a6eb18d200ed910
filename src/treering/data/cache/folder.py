"""The folder of caches: where it is, what stands in it, and how a cache comes into it or goes."""

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.errors import StateError
from treering.files.atomic import MANIFEST, read_facts, seal
from treering.files.lock import FileLock, is_locked

CACHE_VARIABLE = "TREERING_CACHE"
"""Environment variable that names the folder of caches."""

_TOKENS = "tokens"
_DRAFT = ".unfinished-"
_LOCK = ".lock"
_YOUNG_S = 60.0
"""A draft without a lock may be one that takes its lock at this moment, if it is not older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cache, whole or not."""

    folder: Path
    source: str | None
    """The path of the file when the cache was made; None if it cannot be read."""
    num_bytes: int
    made: float
    """Seconds since 1970."""


def cache_folder() -> Path:
    """The folder of caches: `TREERING_CACHE`, else `treering` in `XDG_CACHE_HOME` or `~/.cache`; it may be absent.

    Example: with TREERING_CACHE=/fast/cache it is `/fast/cache/tokens`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get(CACHE_VARIABLE)
    return (Path(named) if named else Path(base, "treering")).expanduser() / _TOKENS


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """A new folder in `folder` to fill; it is removed at the end of the block unless `publish` has renamed it.

    Drafts of killed processes are removed first. Several processes may draft at once.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _clear_drafts(folder, older_than_s=_YOUNG_S)
    draft = folder / f"{_DRAFT}{uuid.uuid4().hex}"
    lock = FileLock(draft.with_suffix(_LOCK), lambda holder: f"{draft} is being written by {holder}")
    try:
        draft.mkdir()
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            draft.with_suffix(_LOCK).unlink()
        lock.release()


def publish(draft: Path, target: Path, facts: Mapping[str, Any]) -> None:
    """Seals a draft with checksums, and makes it `target`, whose readers find it whole or not at all.

    What else has that name is removed, unless another process has just published the same.

    Raises:
        OSError: the disk is full.
    """
    seal(draft, facts)
    try:
        draft.rename(target)
    except OSError:
        if not target.exists():
            raise
        if not _is_whole(target):
            remove(target)
            draft.rename(target)


def remove(target: Path) -> None:
    """Removes a cache; readers that have mapped its files keep them."""
    aside = target.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def entries(folder: Path) -> list[CacheEntry]:
    """The caches of a folder, the newest first."""
    found = [each for each in folder.glob("*") if each.is_dir() and not each.name.startswith(_DRAFT)]
    known = [entry for entry in map(_entry, found) if entry is not None]
    return sorted(known, key=lambda entry: -entry.made)


def clear(folder: Path) -> int:
    """Removes all caches, and the drafts of killed processes; returns how many bytes they took."""
    num_bytes = _num_bytes(folder)
    for entry in entries(folder):
        remove(entry.folder)
    _clear_drafts(folder, older_than_s=0.0)
    return num_bytes - _num_bytes(folder)


def _is_whole(target: Path) -> bool:
    try:
        read_facts(target)
    except StateError:
        return False
    return True


def _entry(folder: Path) -> CacheEntry | None:
    """The cache in a folder; None if another process removes it at this moment."""
    try:
        made = folder.stat().st_mtime
    except FileNotFoundError:
        return None
    return CacheEntry(folder=folder, source=_source(folder), num_bytes=_num_bytes(folder), made=made)


def _source(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["facts"]["source"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _num_bytes(folder: Path) -> int:
    """Of all files; those that other processes remove or rename at this moment may be left out."""
    num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.stat(os.path.join(place, name)).st_size
    return num_bytes


def _clear_drafts(folder: Path, older_than_s: float) -> None:
    for left in folder.glob(f"{_DRAFT}*"):
        with suppress(FileNotFoundError):
            is_old = time.time() - left.stat().st_mtime >= older_than_s
            if is_old and not is_locked(left.with_suffix(_LOCK)):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
