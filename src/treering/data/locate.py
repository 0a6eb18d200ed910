"""Finds the folder of real trajectories on this machine, and the names that a mistyped one may mean."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

DATA_VARIABLE = "TREERING_DATA"
"""Environment variable that names the folder of real data."""


def data_folder() -> Path | None:
    """The folder of real data: `TREERING_DATA`, else `../shared/data`; None if it does not exist.

    Callers that get None use generated trajectories and say so.

    Example: with TREERING_DATA=~/trajectories and that folder present, `data_folder()` is its path.
    """
    folder = Path(os.environ.get(DATA_VARIABLE) or Path("..", "shared", "data")).expanduser()
    return folder if folder.is_dir() else None


def did_you_mean(missing: Iterable[Path]) -> str:
    """A question that names the existing paths whose names are nearest to missing ones; empty without any.

    Example: for `runs/trace.jsonl` beside `runs/traces.jsonl` it is "did you mean runs/traces.jsonl? ".
    """
    found = []
    for path in missing:
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        found += [path.parent / name for name in difflib.get_close_matches(path.name, names, n=2)]
    return f"did you mean {' or '.join(str(path) for path in found[:3])}? " if found else ""
