"""The names under which trackers know a run, kept in its folder, so that a resumed run goes on in the same place."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from treering.errors import StateError
from treering.files.atomic import write_text
from treering.files.writing import check_regular, writing

TRACKERS_FILE = "trackers.json"


def read_names(folder: Path) -> dict[str, str]:
    """The run's name by tracker; empty if it has none.

    Raises:
        StateError: the file is damaged.

    Example: {"wandb": "k3v9x2m1", "mlflow": "0b6c..."} after a run with both.
    """
    file = folder / TRACKERS_FILE
    try:
        check_regular(file)
        found = json.loads(file.read_bytes())
        return {str(tracker): str(name) for tracker, name in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{file} says which runs of trackers belong to a run, and it cannot be read ({error}); remove it, and the "
            "run goes on as a new one there"
        ) from error


def write_name(folder: Path, tracker: str, name: str) -> None:
    """Keeps the run's name of one tracker.

    Raises:
        StateError: the file cannot be written.
    """
    names: Mapping[str, str] = read_names(folder) | {tracker: name}
    with writing(folder / TRACKERS_FILE):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TRACKERS_FILE, json.dumps(names, indent=1) + "\n")


def name_of(folder: Path, tracker: str, *, is_new: bool, stem: str = "") -> str:
    """The kept name of a resumed run; a new one, random after `stem`, for a new run.

    Example: `name_of(Path("runs/a"), "trackio", is_new=True, stem="a-")` is "a-5f0c2e91" once, and stays so.
    """
    known = None if is_new else read_names(folder).get(tracker)
    if known is not None:
        return known
    name = f"{stem}{secrets.token_hex(4)}"
    write_name(folder, tracker, name)
    return name
