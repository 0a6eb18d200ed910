"""Logs of a run as JSON Lines whose objects have a "step": cut when the run resumes, and saved from damage.

Nothing that a run trains depends on them: they are read when they are reopened, to keep what is whole and to say what
is lost. This module imports no torch.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from treering.files.writing import check_regular, writing


@dataclass(slots=True, kw_only=True)
class ScannedFile:
    """What a file of a log holds up to a step.

    Attributes:
        file: the file.
        num_lines: whole lines of each step that is kept.
        num_bytes: length of the file up to the last of them.
        bad: byte ranges of the lines within that length that are no object of a kept step, or that stand twice.
        num_twice: how many of these stand twice.
        num_after: unreadable lines after that length; they may belong to a step that the run repeats.
    """

    file: Path
    num_lines: Counter[int] = field(default_factory=Counter)
    num_bytes: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)
    num_twice: int = 0
    num_after: int = 0


def reopen(
    files: Sequence[Path], last_step: int, expected: Mapping[int, int | None], *, log: Path, one_per_step: bool = False
) -> None:
    """Keeps each whole line of the steps up to `last_step` once, and removes the others; files without lines go.

    Lines of later steps are removed without a word, and so is a last line that a kill left unfinished: the run repeats
    these steps. Other losses are damage, and one warning counts them. A damaged file is kept as `NAME.damaged`,
    `NAME.damaged-2` and so on.

    Args:
        files: of the log; absent ones are left out.
        last_step: the last step to keep.
        expected: number of lines by step; None if at least one. Steps that are left out may have any number.
        log: file or folder that the warning names.
        one_per_step: whether a second line of a step is damage, and not only an equal one.

    Raises:
        StateError: a file cannot be read or written, or is none.

    Example: a file with lines of steps 1, 1, 2 and 3, reopened at 2, holds those of 1, 1 and 2. If the first is
    unreadable, 1 and 2 stay, the file as it was is `NAME.damaged`, and a warning says "1 unreadable line, 1 missing
    line of step 1".
    """
    scanned = [_scan(file, last_step, one_per_step=one_per_step) for file in files if os.path.lexists(file)]
    found = sum((each.num_lines for each in scanned), Counter[int]())
    missing = {step: (number or 1) - found[step] for step, number in expected.items() if found[step] < _least(number)}
    # What stands after the last kept line is a later step's, unless lines are missing.
    damaged = [each for each in scanned if each.bad or (missing and each.num_after)]
    kept_as = [_set_aside(each.file).name for each in damaged]
    for each in scanned:
        _rewrite(each) if each.bad else _cut(each)
    if damaged or missing:
        warnings.warn(_damage(log, damaged, missing, kept_as), stacklevel=3)


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file as objects with a "step"; others, and a missing file, are left out.

    Raises:
        StateError: the file cannot be read.

    Example: a file with the lines `{"step": 1}` and `{"st` gives `{"step": 1}`.
    """
    if not file.exists():
        return
    with _opened(file) as lines:
        for line in lines:
            row = _parse(line)
            if row is not None:
                yield row


def append(stream: BinaryIO, line: bytes) -> None:
    r"""Writes a line to an unbuffered file, wholly; once it returns, a killed process does not lose it.

    Raises:
        OSError: the disk is full; a part of the line may be in the file, which `reopen` removes.

    Example: `append(Path("metrics.jsonl").open("ab", buffering=0), b'{"step": 1}\n')`.
    """
    left = memoryview(line)
    while left:
        left = left[stream.write(left) :]


def spans(steps: Collection[int]) -> str:
    """Steps in words.

    Example: {2, 4, 5, 6} gives "2, 4 to 6".
    """
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and parts[-1][-1] == step - 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def _least(number: int | None) -> int:
    return 1 if number is None else number


def _opened(file: Path) -> BinaryIO:
    with writing(file):
        check_regular(file)
        return file.open("rb")


def _scan(file: Path, last_step: int, *, one_per_step: bool) -> ScannedFile:
    found, seen = ScannedFile(file=file), set[Any]()
    start, pending, num_twice = 0, list[tuple[int, int]](), 0
    with _opened(file) as lines:
        for line in lines:
            end, row = start + len(line), _parse(line)
            step = None if row is None else row["step"]
            key = step if one_per_step else hashlib.blake2b(line, digest_size=16).digest()
            if step is None or step > last_step or key in seen:
                pending.append((start, end))
                num_twice += key in seen and step is not None
                found.num_after += step is None
            else:
                seen.add(key)
                found.num_lines[step] += 1
                found.num_twice += num_twice
                found.bad, found.num_bytes, found.num_after = [*found.bad, *pending], end, 0
                pending, num_twice = [], 0
            start = end
    return found


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line with a step; None if it is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if is_row else None


def _set_aside(file: Path) -> Path:
    """Keeps a copy beside the file, so that a kill at any moment leaves the file as it was or as it will be."""
    names = (f"{file.name}.damaged" + (f"-{number}" if number > 1 else "") for number in count(1))
    aside = next(path for name in names if not os.path.lexists(path := file.with_name(name)))
    with writing(aside, file.stat().st_size):
        shutil.copyfile(file, aside)
    return aside


def _cut(scanned: ScannedFile) -> None:
    with writing(scanned.file):
        os.truncate(scanned.file, scanned.num_bytes)
        if scanned.num_bytes == 0 and not scanned.file.is_symlink():
            scanned.file.unlink()


def _rewrite(scanned: ScannedFile) -> None:
    # A link stays one.
    file = scanned.file.resolve()
    draft = file.with_name(f".{file.name}.unfinished")
    with writing(file, scanned.num_bytes), file.open("rb") as source, draft.open("wb") as target:
        position = 0
        for start, end in [*scanned.bad, (scanned.num_bytes, scanned.num_bytes)]:
            target.write(source.read(start - position))
            source.seek(end)
            position = end
        target.flush()
        os.fsync(target.fileno())
        os.replace(draft, file)


def _damage(log: Path, damaged: Sequence[ScannedFile], missing: Mapping[int, int], kept_as: Sequence[str]) -> str:
    num_bad = sum(len(each.bad) + each.num_after for each in damaged)
    num_twice, num_missing = sum(each.num_twice for each in damaged), sum(missing.values())
    losses = []
    if num_bad > num_twice:
        losses.append(_counted(num_bad - num_twice, "unreadable"))
    if num_twice:
        losses.append(_counted(num_twice, "repeated"))
    if missing:
        steps = "step" if len(missing) == 1 else "steps"
        losses.append(f"{_counted(num_missing, 'missing')} of {steps} {spans(missing)}")
    kept = f"; the damaged file is kept as {', '.join(kept_as)}" if kept_as else ""
    return f"{log} is damaged: {', '.join(losses)}{kept}; what can be read stays, and training does not depend on it"


def _counted(number: int, kind: str) -> str:
    return f"1 {kind} line" if number == 1 else f"{number} {kind} lines"
