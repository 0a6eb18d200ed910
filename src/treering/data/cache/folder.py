"""The folder of caches: its path, its entries, and how a cache is written and removed."""

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
from treering.files.lock import FileLock, is_locked
from treering.files.writing import MANIFEST, read_facts, seal

CACHE_VARIABLE = "TREERING_CACHE"
"""Environment variable that names the folder of caches."""

_TOKENS = "tokens"
_DRAFT = ".unfinished-"
_LOCK = ".lock"
_YOUNG_S = 60.0
"""Age in seconds up to which a draft without a lock may be about to take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A cache, whole or damaged."""

    folder: Path
    source: str | None
    """Path of the source file when the cache was built; None if it cannot be read."""
    num_bytes: int
    made: float
    """Time of the build, in seconds since 1970."""


def cache_folder() -> Path:
    """Return the folder of caches, in `TREERING_CACHE`, else in `treering` of `XDG_CACHE_HOME` or `~/.cache`.

    The folder may not exist.

    Example: with TREERING_CACHE=/fast/cache it is `/fast/cache/tokens`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get(CACHE_VARIABLE)
    return (Path(named) if named else Path(base, "treering")).expanduser() / _TOKENS


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """Create a draft in `folder`, which is removed at the end of the block unless `publish` has renamed it.

    Drafts of killed processes are removed first. Several processes may write drafts at once.
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
    """Seal a draft with checksums and rename it to `target`, which readers find whole or not at all.

    Something else with that name is removed, unless another process has just published the same cache.
    """
    seal(draft, facts)
    try:
        draft.rename(target)
    except OSError:
        if not target.exists():
            raise
        try:
            read_facts(target)
        except StateError:
            remove(target)
            draft.rename(target)


def remove(target: Path) -> None:
    """Remove a cache; readers that have mapped its files are not affected."""
    aside = target.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def entries(folder: Path) -> list[CacheEntry]:
    """Return the caches of a folder, newest first."""
    found = []
    for each in folder.glob("*"):
        # Another process may remove a cache meanwhile.
        with suppress(FileNotFoundError):
            if each.is_dir() and not each.name.startswith(_DRAFT):
                made = each.stat().st_mtime
                found.append(CacheEntry(folder=each, source=_source(each), num_bytes=_num_bytes(each), made=made))
    return sorted(found, key=lambda entry: -entry.made)


def clear(folder: Path) -> int:
    """Remove all caches and the drafts of killed processes; return the number of freed bytes."""
    num_bytes = _num_bytes(folder)
    for entry in entries(folder):
        remove(entry.folder)
    _clear_drafts(folder, older_than_s=0.0)
    return num_bytes - _num_bytes(folder)


def _source(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["facts"]["source"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _num_bytes(folder: Path) -> int:
    """Return the size of all files, except those that other processes remove meanwhile."""
    num_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.stat(os.path.join(root, name)).st_size
    return num_bytes


def _clear_drafts(folder: Path, older_than_s: float) -> None:
    for left in folder.glob(f"{_DRAFT}*"):
        with suppress(FileNotFoundError):
            is_old = time.time() - left.stat().st_mtime >= older_than_s
            if is_old and not is_locked(left.with_suffix(_LOCK)):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
