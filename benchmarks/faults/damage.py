"""What may happen to a file between two runs: every kind of damage, drawn from a seed."""

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

Damage = Callable[[Path, Random], None]
"""Changes one file in place."""

MARKER = "executed"
"""File next to the run folder that a pickle in it would make if it were executed."""


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


def _flip_bit(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def _zero(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    size = max(1, len(content) // 4)
    start = random.randrange(len(content) - size + 1)
    content[start : start + size] = bytes(size)
    file.write_bytes(content)


def _cut(file: Path, random: Random) -> None:
    os.truncate(file, random.randrange(1, file.stat().st_size))


def _empty(file: Path, random: Random) -> None:
    os.truncate(file, 0)


def _delete(file: Path, random: Random) -> None:
    file.unlink()


def _delete_line(file: Path, random: Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    del lines[random.randrange(len(lines))]
    file.write_bytes(b"".join(lines))


def _repeat_line(file: Path, random: Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    index = random.randrange(len(lines))
    file.write_bytes(b"".join([*lines[: index + 1], *lines[index:]]))


def _break_encoding(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] = 0xFF
    file.write_bytes(content)


def _pickle(file: Path, random: Random) -> None:
    run = next(parent for parent in file.parents if (parent / "run.json").exists() or parent.name == "run")
    file.write_bytes(pickle.dumps(_Bomb(run.parent / MARKER)))


def _folder(file: Path, random: Random) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path, random: Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _link_to_nothing(file: Path, random: Random) -> None:
    file.unlink()
    file.symlink_to(file.parent / "absent" / "file")


def _link_to_itself(file: Path, random: Random) -> None:
    file.unlink()
    file.symlink_to(file)


DAMAGES: Mapping[str, Damage] = {
    "a bit flipped": _flip_bit,
    "a quarter zeroed": _zero,
    "cut": _cut,
    "emptied": _empty,
    "deleted": _delete,
    "not UTF-8": _break_encoding,
    "replaced by a pickle that runs a command": _pickle,
    "replaced by a folder": _folder,
    "replaced by a pipe": _pipe,
    "replaced by a link to nothing": _link_to_nothing,
    "replaced by a link to itself": _link_to_itself,
}
LINE_DAMAGES: Mapping[str, Damage] = {"a line deleted": _delete_line, "a line twice": _repeat_line}
"""Damages that files of lines can have."""

FILES: Mapping[str, str] = {
    "metrics.jsonl": "metrics.jsonl",
    "rollouts": "rollouts/epoch-*.jsonl",
    "run.json": "run.json",
    "config.json": "config.json",
    "a checkpoint's weights": "checkpoints/*/model.safetensors",
    "a checkpoint's state": "checkpoints/*/training_state.pt",
    "a checkpoint's manifest": "checkpoints/*/manifest.json",
    "a checkpoint's config.json": "checkpoints/*/config.json",
    "history": "history/step-*",
    "run.lock": "run.lock",
}
"""Files of a run folder that are damaged, as patterns."""


def damages_of(pattern: str) -> Mapping[str, Damage]:
    """The kinds of damage that a file can have."""
    return {**DAMAGES, **LINE_DAMAGES} if pattern.endswith(".jsonl") else DAMAGES


def damage(folder: Path, pattern: str, how: Damage, random: Random) -> Path:
    """Damages one of the files of a pattern, and returns it."""
    file = random.choice(sorted(folder.glob(pattern)))
    how(file, random)
    return file
