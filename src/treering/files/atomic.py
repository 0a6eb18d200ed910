"""Writes files and folders atomically: a killed process leaves the old version or the new one, whole.

They are written next to their target under a hidden name, flushed to disk and renamed. A folder's manifest holds the
size and SHA-256 of every file. This module imports no torch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from treering.errors import StateError
from treering.files.writing import check_regular

MANIFEST = "manifest.json"
_HIDDEN = ".unfinished-"


def write_folder(target: Path, fill: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
    """Makes the folder `target` with the files that `fill` writes into the folder that it is given.

    A kill at any moment leaves no `target` or a whole one; an older `target` is replaced. Every file gets the mode that
    the umask leaves to a new file, also where `fill` made it private.

    Args:
        target: absent, or something that may be replaced.
        fill: writes the files; it may create subfolders.
        facts: JSON values stored in the manifest with the checksums.

    Raises:
        OSError: the disk is full or read-only; an older `target` is unchanged, and no draft is left.

    Example: `fill` writes `a.bin`; the folder then holds `a.bin` and `manifest.json`, and `read_facts` gives `facts`.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    clear_unfinished(parent)
    draft = draft_path(target)
    draft.mkdir()
    try:
        fill(draft)
        seal(draft, facts)
        flush_all(draft)
        if os.path.lexists(target):
            remove(target)
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _flush(parent)


def draft_path(target: Path) -> Path:
    """What is written before it becomes `target`, a folder of `write_folder` or a file."""
    return target.parent / f"{_HIDDEN}{target.name}"


def seal(draft: Path, facts: Mapping[str, Any]) -> None:
    """Adds the manifest to a folder that `read_facts` is to read."""
    content = {"facts": dict(facts), "files": {str(file.relative_to(draft)): _facts_of(file) for file in _files(draft)}}
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1), encoding="utf-8")
    for file in _files(draft):
        file.chmod(manifest.stat().st_mode)


def flush_all(draft: Path) -> None:
    """Flushes every file of a folder to disk."""
    for path in [*_files(draft), *_folders(draft)]:
        _flush(path)


def write_text(target: Path, text: str) -> None:
    """Makes or replaces the file `target`; a kill at any moment leaves the old one or the new one, whole.

    Several processes may write one target at a time: the last one wins.

    Example: `write_text(Path("costs.json"), "{}")`.
    """
    write_file(target, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_file(target: Path, fill: Callable[[Path], object]) -> None:
    """As `write_text`, for what `fill` writes into the file that it is given, which begins with a dot.

    Example: `write_file(Path("costs.json"), lambda draft: draft.write_text("{}"))`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fill(draft)
        _flush(draft)
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    _flush(target.parent)


def remove(path: Path) -> None:
    """Removes a folder, or a file or link in its place; if killed midway, nothing is left under its name."""
    renamed = path.with_name(f"{_HIDDEN}{path.name}.old")
    os.rename(path, renamed)
    _delete(renamed)


def clear_unfinished(parent: Path) -> None:
    """Removes leftovers of killed processes from a folder; no other process may be writing there."""
    for leftover in parent.glob(f"{_HIDDEN}*"):
        _delete(leftover)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a folder that `write_folder` made, after verifying every checksum.

    Raises:
        StateError: a file is missing or changed, by name.
    """
    try:
        check_regular(folder / MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        content = {name: dict(manifest[name]) for name in ("facts", "files")}
        digest = manifest.get("sha256")
    except (OSError, StateError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{folder.name}: {MANIFEST} is missing or unreadable ({error})") from error
    if digest != _digest(content):
        raise StateError(f"{folder.name}: {MANIFEST} has changed since it was written")
    for name, expected in content["files"].items():
        try:
            check_regular(folder / name)
            found = _facts_of(folder / name)
        except (OSError, StateError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StateError(f"{folder.name}: {name} is missing or unreadable ({reason})") from error
        if found != expected:
            raise StateError(f"{folder.name}: {name} has changed since it was written")
    return content["facts"]


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    return [*(path for path in folder.rglob("*") if path.is_dir()), folder]


def _facts_of(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"num_bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
