"""Atomic writes of files and folders: a killed process leaves the old version or the new one, whole.

A draft is written next to its target under a hidden name, flushed to disk and renamed. The manifest of a folder holds
the size and SHA-256 of every file. Errors of the disk become one line with a fix, and a pipe or folder with the name of
a file is refused. This module does not import torch.
"""

import errno
import hashlib
import json
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from treering.errors import InputError, StateError, TreeringError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into an error with a fix.

    Args:
        path: file or folder that the block writes.
        num_bytes: number of bytes that it writes; None for a few thousand.

    Raises:
        StateError: the block raised an OSError.

    Example: on a full disk `with writing(Path("run/metrics.jsonl"), 200): ...` raises "run/metrics.jsonl cannot be
    written (No space left on device): 200 bytes are needed and 0 are free; free space there, and start again".
    """
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path} cannot be written ({error.strerror or error}): {_advice(path, error, num_bytes)}"
        ) from error


def check_regular(path: Path) -> None:
    """Check that `path` is absent, a regular file or a link to one; opening a pipe would wait forever.

    Raises:
        StateError: a folder, pipe or device has that name.
        OSError: the parent folder cannot be read.

    Example: `check_regular(Path("run.json"))` passes if there is no `run.json`.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise StateError(f"{path} belongs to a file, and a {kind} has that name; move it away, and start again")


def allocate(file: Path, num_bytes: int) -> None:
    """Check that a file of `num_bytes` fits on the disk, for libraries that hide the system's error.

    Raises:
        OSError: the disk is full, or a quota or limit is reached.

    Example: `allocate(Path("state.pt"), 1 << 30)` raises ENOSPC on a small disk. No file remains in either case.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
        file.unlink()


def _advice(path: Path, error: OSError, num_bytes: int | None) -> str:
    needed = "a few thousand bytes are needed" if num_bytes is None else f"{num_bytes:,} bytes are needed"
    if error.errno in FULL:
        return f"{needed} and {_num_free(path):,} are free; free space or raise the quota there, and start again"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"{needed} and files are limited to {limit:,} (ulimit -f); raise the limit, and start again"
    if error.errno in _FORBIDDEN:
        return "the folder must be writable; change its permissions or its mount, or choose another"
    if error.errno in _IN_THE_WAY:
        return f"something else has the name {error.filename or path}; move it away, and start again"
    return f"{needed}; check the disk, and start again"


def _num_free(path: Path) -> int:
    existing = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    disk = os.statvfs(existing)
    return disk.f_bavail * disk.f_frsize


def read_object(file: Path, kind: type[TreeringError] = InputError, *, fix: str = "fetch it again") -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        file: file in UTF-8.
        kind: class of the error.
        fix: advice at the end of the error.

    Raises:
        TreeringError: the file cannot be read, or is not a JSON object.

    Example: a file with `[1]` raises "config.json is a JSON object, got list; fetch it again".
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"{file} is a JSON object, and this one cannot be read ({error}); {fix}") from error
    if not isinstance(value, dict):
        raise kind(f"{file} is a JSON object, got {type(value).__name__}; {fix}")
    return value


MANIFEST = "manifest.json"
CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of a run with a folder for each checkpoint."""
_HIDDEN = ".unfinished-"


def write_folder(target: Path, fill: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
    """Write the folder `target` with the files that `fill` puts into a draft.

    A kill leaves no `target` or a whole one; an older `target` is replaced. Every file gets the mode that the umask
    gives a new file, also if `fill` made it private.

    Args:
        target: absent, or a folder or file that may be replaced.
        fill: writes the files into the draft's path; it may create subfolders.
        facts: JSON values that the manifest stores with the checksums.

    Raises:
        OSError: the disk is full or read-only; an older `target` is unchanged, and the draft is removed.

    Example: `fill` writes `a.bin`; the folder has `a.bin` and `manifest.json`, and `read_facts` returns `facts`.
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
    """Return the path at which a file or folder is written before it is renamed to `target`."""
    return target.parent / f"{_HIDDEN}{target.name}"


def seal(draft: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest that `read_facts` reads and checks."""
    content = {"facts": dict(facts), "files": {str(file.relative_to(draft)): _facts_of(file) for file in _files(draft)}}
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1), encoding="utf-8")
    for file in _files(draft):
        file.chmod(manifest.stat().st_mode)


def flush_all(draft: Path) -> None:
    """Flush every file of a folder to disk."""
    for path in [*_files(draft), *_folders(draft)]:
        _flush(path)


def write_text(target: Path, text: str) -> None:
    """Write or replace the file `target`; a kill leaves the old file or the new one, whole.

    Several processes may write the same file at once; the last one wins.

    Example: `write_text(Path("costs.json"), "{}")`.
    """
    write_file(target, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_file(target: Path, fill: Callable[[Path], object]) -> None:
    """Write or replace the file `target` as `write_text` does, with what `fill` writes into a draft.

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
    """Remove a folder, file or link; after a kill midway, nothing has its name."""
    renamed = path.with_name(f"{_HIDDEN}{path.name}.old")
    os.rename(path, renamed)
    _delete(renamed)


def clear_unfinished(parent: Path) -> None:
    """Remove leftovers of killed processes from a folder; no other process may be writing there."""
    for leftover in parent.glob(f"{_HIDDEN}*"):
        _delete(leftover)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts of a folder that `write_folder` wrote, after a check of every checksum.

    Raises:
        StateError: a file is missing or has changed; the message names it.
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
