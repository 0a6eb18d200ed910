"""Writes files and folders atomically: a killed process leaves the old version or the new one, whole.

They are written next to their target under a hidden name, flushed to disk and renamed. A folder's manifest holds the
size and SHA-256 of every file. This module imports no torch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treering.errors import StateError

MANIFEST = "manifest.json"
_HIDDEN = ".unfinished-"


def write_folder(target: Path, fill: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
    """Makes the folder `target` with the files that `fill` writes into the folder that it is given.

    A kill at any moment leaves no `target` or a whole one; an older `target` is replaced.

    Args:
        target: absent, or a folder that may be replaced.
        fill: writes the files; it may create subfolders.
        facts: JSON values stored in the manifest with the checksums.

    Example: `fill` writes `a.bin`; the folder then holds `a.bin` and `manifest.json`, and `read_facts` gives `facts`.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    clear_unfinished(parent)
    draft = parent / f"{_HIDDEN}{target.name}"
    draft.mkdir()
    fill(draft)
    files = {str(file.relative_to(draft)): _facts_of(file) for file in _files(draft)}
    (draft / MANIFEST).write_text(json.dumps({"facts": dict(facts), "files": files}, indent=1), encoding="utf-8")
    for path in [*_files(draft), *_folders(draft)]:
        _flush(path)
    if target.exists():
        remove_folder(target)
    os.rename(draft, target)
    _flush(parent)


def write_text(target: Path, text: str) -> None:
    """Makes or replaces the file `target`; a kill at any moment leaves the old one or the new one, whole.

    Several processes may write one target at a time: the last one wins.

    Example: `write_text(Path("costs.json"), "{}")`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    _flush(draft)
    os.replace(draft, target)
    _flush(target.parent)


def remove_folder(folder: Path) -> None:
    """Removes a folder; if killed midway, nothing is left under its name."""
    renamed = folder.with_name(f"{_HIDDEN}{folder.name}.old")
    os.rename(folder, renamed)
    shutil.rmtree(renamed)


def clear_unfinished(parent: Path) -> None:
    """Removes leftovers of killed processes from a folder; no other process may be writing there."""
    for leftover in parent.glob(f"{_HIDDEN}*"):
        shutil.rmtree(leftover)


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a folder that `write_folder` made, after verifying every checksum.

    Raises:
        StateError: a file is missing or changed, by name.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, facts = dict(manifest["files"]), dict(manifest["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{folder.name}: {MANIFEST} is missing or unreadable ({error})") from error
    for name, expected in files.items():
        file = folder / name
        try:
            found = _facts_of(file)
        except OSError as error:
            raise StateError(f"{folder.name}: {name} is missing or unreadable ({error.strerror})") from error
        if found != expected:
            raise StateError(f"{folder.name}: {name} has changed since it was written")
    return facts


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
