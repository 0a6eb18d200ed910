"""Finds the folder of real trajectories on this machine."""

import os
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
