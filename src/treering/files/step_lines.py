"""Logs of a run as JSON Lines whose objects have a "step"; they are truncated when the run resumes.

Training does not depend on them. `reopen` keeps the lines that are whole and warns of the lines that are lost. This
module does not import torch.
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

from treering.errors import plural
from treering.files.writing import check_regular, writing


@dataclass(slots=True, kw_only=True)
class ScannedFile:
    """Lines of a log file up to a step.

    Attributes:
        file: the file.
        num_lines: number of whole lines of each kept step.
        num_bytes: length of the file up to the last kept line.
        bad: byte ranges within that length of lines that are unreadable, repeated, or of a step that is not kept.
        num_repeated: number of repeated lines among them.
        num_after: unreadable lines after that length; they may belong to a step that the run repeats.
    """

    file: Path
    num_lines: Counter[int] = field(default_factory=Counter)
    num_bytes: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)
    num_repeated: int = 0
    num_after: int = 0


def reopen(
    files: Sequence[Path], last_step: int, expected: Mapping[int, int | None], *, log: Path, one_per_step: bool = False
) -> None:
    """Keep each whole line of the steps up to `last_step` once and remove the others; delete files without lines.

    Lines of later steps and an unfinished last line are removed silently, because the run repeats these steps. Other
    losses are damage, which one warning counts. A damaged file is kept as `NAME.damaged`, `NAME.damaged-2` and so on.

    Args:
        files: files of the log; absent files are skipped.
        last_step: last step to keep.
        expected: number of lines by step; None for at least one. Steps that it lacks may have any number.
        log: file or folder that the warning names.
        one_per_step: whether any second line of a step is damage; otherwise only an equal line is.

    Raises:
        StateError: a file cannot be read or written, or is not a regular file.

    Example: a file with lines of steps 1, 1, 2 and 3, reopened at step 2, has lines of steps 1, 1 and 2. If the first
    line is unreadable, lines of steps 1 and 2 are kept, the old file is `NAME.damaged`, and a warning has "1 unreadable
    line, 1 missing line of step 1".
    """
    scanned = [_scan(file, last_step, one_per_step=one_per_step) for file in files if os.path.lexists(file)]
    found = sum((each.num_lines for each in scanned), Counter[int]())
    least = {step: 1 if number is None else number for step, number in expected.items()}
    missing = {step: number - found[step] for step, number in least.items() if found[step] < number}
    # Lines after the last kept one belong to later steps, unless lines are missing.
    damaged = [each for each in scanned if each.bad or (missing and each.num_after)]
    kept_as = [_set_aside(each.file).name for each in damaged]
    for each in scanned:
        _rewrite(each) if each.bad else _cut(each)
    if damaged or missing:
        warnings.warn(_damage(log, damaged, missing, kept_as), stacklevel=3)


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file that are objects with a "step"; nothing for a missing file.

    Raises:
        StateError: the file cannot be read.

    Example: a file with the lines `{"step": 1}` and `{"st` yields `{"step": 1}`.
    """
    if not file.exists():
        return
    with _opened(file) as lines:
        for line in lines:
            row = _parse(line)
            if row is not None:
                yield row


def append(stream: BinaryIO, line: bytes) -> None:
    r"""Write a whole line to an unbuffered file; once it returns, a killed process does not lose the line.

    Raises:
        OSError: the disk is full; the file may end with a part of the line, which `reopen` removes.

    Example: `append(Path("metrics.jsonl").open("ab", buffering=0), b'{"step": 1}\n')`.
    """
    left = memoryview(line)
    while left:
        left = left[stream.write(left) :]


def spans(steps: Collection[int]) -> str:
    """Return steps as text.

    Example: {2, 4, 5, 6} is "2, 4 to 6".
    """
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and parts[-1][-1] == step - 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def _opened(file: Path) -> BinaryIO:
    with writing(file):
        check_regular(file)
        return file.open("rb")


def _scan(file: Path, last_step: int, *, one_per_step: bool) -> ScannedFile:
    found, seen = ScannedFile(file=file), set[Any]()
    start, pending, num_repeated = 0, list[tuple[int, int]](), 0
    with _opened(file) as lines:
        for line in lines:
            end, row = start + len(line), _parse(line)
            step = None if row is None else row["step"]
            key = step if one_per_step else hashlib.blake2b(line, digest_size=16).digest()
            if step is None or step > last_step or key in seen:
                pending.append((start, end))
                num_repeated += key in seen and step is not None
                found.num_after += step is None
            else:
                seen.add(key)
                found.num_lines[step] += 1
                found.num_repeated += num_repeated
                found.bad, found.num_bytes, found.num_after = [*found.bad, *pending], end, 0
                pending, num_repeated = [], 0
            start = end
    return found


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if is_row else None


def _set_aside(file: Path) -> Path:
    # A copy, so that a kill leaves either the old file or the new one.
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
    # A symbolic link is kept; its target is replaced.
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
    num_repeated = sum(each.num_repeated for each in damaged)
    losses = []
    if num_bad > num_repeated:
        losses.append(plural(num_bad - num_repeated, "unreadable line"))
    if num_repeated:
        losses.append(plural(num_repeated, "repeated line"))
    if missing:
        steps = "step" if len(missing) == 1 else "steps"
        losses.append(f"{plural(sum(missing.values()), 'missing line')} of {steps} {spans(missing)}")
    kept = f"; the damaged file is kept as {', '.join(kept_as)}" if kept_as else ""
    return f"{log} is damaged: {', '.join(losses)}{kept}; readable lines are kept, and training does not depend on it"
