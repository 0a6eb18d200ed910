"""Checkpoints of trained models, named by paths of Tinker's protocol; each folder is written atomically."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from treering.errors import InputError, StateError
from treering.files.writing import MANIFEST, read_facts, read_object, remove, write_folder, writing
from treering.serving.server import Refusal

_PATH = re.compile(r"tinker://([0-9a-f]{32}):train:(\d{1,9})/(weights|sampler_weights)/(\w[\w.-]{0,127})", re.ASCII)
_KINDS = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """Checkpoint: its path in the protocol, its folder, and its metadata."""

    path: str
    folder: Path
    facts: Mapping[str, Any]

    def card(self) -> dict[str, Any]:
        """Return its record in answers."""
        kind, name = self.path.split("/")[-2:]
        return {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": _KINDS[kind],
            "time": self.facts["time"],
            "tinker_path": self.path,
            "size_bytes": sum(file.stat().st_size for file in self.folder.iterdir()),
            "user_metadata": self.facts.get("user_metadata"),
            "expires_at": self.facts.get("expires_at"),
        }


class Checkpoints:
    """Checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        """Keep checkpoints in `folder`, which the first one creates."""
        self.folder = folder

    def folder_of(self, path: str) -> Path:
        """Return the folder of a path's checkpoint, whether it exists or not.

        Raises:
            InputError: the path is not one of this protocol.
        """
        found = _PATH.fullmatch(path)
        if found is None:
            raise InputError(f"a path is tinker://MODEL_ID/weights/NAME or .../sampler_weights/NAME, got {path!r:.200}")
        session, number, kind, name = found.groups()
        return self.folder / f"{session}-{number}" / kind / name

    def save(
        self, path: str, fill: Callable[[Path], None], facts: Mapping[str, Any], *, ttl_s: int | None, overwrites: bool
    ) -> str:
        """Write a checkpoint atomically and return its path.

        Raises:
            InputError: it exists and may not be overwritten.
            StateError: the disk is full, or the folder is not writable.
        """
        target, now = self.folder_of(path), datetime.now(UTC)
        if target.exists() and not overwrites:
            raise InputError(f"{path} already exists; choose another name, or set overwrite")
        expires = {} if ttl_s is None else {"expires_at": (now + timedelta(seconds=ttl_s)).isoformat()}
        with writing(target):
            write_folder(target, fill, {**facts, "time": now.isoformat(), **expires})
        return path

    def find(self, path: str, *, checks: bool = True) -> SavedModel:
        """Return a checkpoint; `checks` verifies all its files.

        Raises:
            Refusal: 404, it does not exist or has expired.
            StateError: it is damaged.
        """
        folder = self.folder_of(path)
        if folder.is_dir():
            saved = SavedModel(path=path, folder=folder, facts=_facts(folder, checks=checks))
            if not self._has_expired(saved):
                return saved
        raise Refusal(404, f"no checkpoint {path!r:.200}; list_checkpoints shows which exist")

    def all(self, run: str = "*") -> Iterator[SavedModel]:
        """Yield the checkpoints of a run, or of all runs, oldest first."""
        found = []
        for folder in self.folder.glob(f"{run.replace(':train:', '-')}/*weights/[!.]*"):
            session, _, number = folder.parts[-3].partition("-")
            path = f"tinker://{session}:train:{number}/{folder.parts[-2]}/{folder.name}"
            if _PATH.fullmatch(path) and (folder / MANIFEST).is_file():
                saved = SavedModel(path=path, folder=folder, facts=_facts(folder, checks=False))
                if not self._has_expired(saved):
                    found.append(saved)
        yield from sorted(found, key=lambda saved: str(saved.facts["time"]))

    def remove(self, path: str) -> None:
        """Remove a checkpoint.

        Raises:
            Refusal: 404, it does not exist.
        """
        remove(self.find(path, checks=False).folder)

    def _has_expired(self, saved: SavedModel) -> bool:
        expires = saved.facts.get("expires_at")
        has_expired = expires is not None and datetime.fromisoformat(expires) < datetime.now(UTC)
        if has_expired:
            remove(saved.folder)
        return has_expired


def _facts(folder: Path, *, checks: bool) -> Mapping[str, Any]:
    if checks:
        return read_facts(folder)
    facts: Mapping[str, Any] = read_object(folder / MANIFEST, StateError)["facts"]
    return facts
