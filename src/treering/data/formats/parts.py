"""Datasets in parts: files named NAME-00001-of-00003, of which some may be missing."""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from treering.errors import DataWarning, InputError

_PART = re.compile(r"(?P<begin>.*\D)(?P<number>\d{1,5})(?P<of>[-_.]of[-_.])(?P<count>\d{1,5})(?P<end>\D.*)?")
_DIGEST = re.compile(r"-[0-9a-f]{16}(?=\.)")
"""What older names on the Hugging Face Hub have after the count, each part its own."""


def missing_parts(file: Path) -> list[str]:
    """The names of the parts that should stand beside a part and do not; none of a file that is no part.

    Example: beside train-00000-of-00002.parquet alone, train-00001-of-00002.parquet is missing.
    """
    match = _PART.fullmatch(_DIGEST.sub("", file.name))
    if match is None:
        return []
    found = {_DIGEST.sub("", path.name) for path in file.parent.iterdir() if path.is_file()}
    count, width = int(match["count"]), len(match["number"])
    # Parts are counted from 0, in some sets from 1.
    names = [f"{match['begin']}{i:0{width}}{match['of']}{match['count']}{match['end'] or ''}" for i in range(count + 1)]
    there = [name for name in names if name in found]
    expected = names[1:] if names[-1] in there and names[0] not in there else names[:-1]
    return [name for name in expected if name not in there]


def check_parts(folder: Path, files: Iterable[Path]) -> None:
    """Refuses files of a dataset of which parts are missing.

    Raises:
        InputError: names a missing part and their number.
    """
    missing = sorted({name for file in files for name in missing_parts(file)})
    if missing:
        raise InputError(
            f"{folder}: the parts of a dataset are read together, and {_listed(missing)}; fetch the folder again, or "
            "name the files that are to be read"
        )


def say_missing_parts(file: Path) -> None:
    """Says of a part that is read by its name that others are missing beside it.

    Warns:
        DataWarning: names a missing part and their number.
    """
    if missing := missing_parts(file):
        warnings.warn(f"{file}: this is a part of a dataset, and {_listed(missing)}", DataWarning, stacklevel=3)


def _listed(missing: list[str]) -> str:
    more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
    return f"{missing[0]}{more} missing"
