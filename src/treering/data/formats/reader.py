"""Reads trajectories from the files that people have, whatever holds the records and whatever format they have."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from treering.data.formats.adapters.atif import decode_atif
from treering.data.formats.adapters.chat import decode_chat
from treering.data.formats.adapters.nemo_gym import decode_nemo_gym
from treering.data.formats.adapters.openhands import decode_openhands
from treering.data.formats.adapters.sharegpt import decode_sharegpt
from treering.data.formats.adapters.swe_agent import decode_swe_agent
from treering.data.formats.adapters.trl import decode_trl
from treering.data.formats.adapters.verifiers import decode_verifiers
from treering.data.formats.adapters.verl import decode_verl
from treering.data.formats.containers import read_records
from treering.data.formats.detect import FormatName, check_format, detect
from treering.data.formats.fields import show
from treering.data.formats.tasks import Note
from treering.data.trajectory import Trajectory
from treering.errors import DataWarning, InputError

_Decode: TypeAlias = Callable[[Mapping[str, Any], Note], list[Trajectory]]

_DECODERS: Mapping[str, _Decode] = MappingProxyType(
    {
        "treering": decode_chat,
        "chat": decode_chat,
        "sharegpt": decode_sharegpt,
        "trl": decode_trl,
        "verifiers": decode_verifiers,
        "swe_agent": decode_swe_agent,
        "openhands": decode_openhands,
        "nemo_gym": decode_nemo_gym,
        "verl": decode_verl,
        "atif": decode_atif,
    }
)


def read_trajectories(path: str | os.PathLike[str], format: FormatName = "auto") -> list[Trajectory]:
    """All trajectories of a file or dataset folder, in its order.

    Read are JSON Lines, JSON documents, Parquet and Arrow files and Hugging Face datasets on disk, compressed or not:
    see `containers.read_records`. `docs/data.md` says what is read of each format.

    Args:
        path: the file, or the folder of a dataset.
        format: of the records; "auto" finds it from the keys of the first one. All records have the same.

    Raises:
        InputError: a bad record, as "FILE:LINE: rule, value, fix"; a file that is missing, corrupt or empty.
        MissingExtraError: a table without pyarrow.

    Warns:
        DataWarning: something of the file that its owner should know, each sentence one time.

    Example: a file with the line `{"task_id": "a", "tokens": [5, 6]}` gives one trajectory of two tokens.
    """
    file = Path(path)
    trajectories = [one for _, found in decoded_records(file, format) for one in found]
    if not trajectories:
        raise InputError(f"{file}: a trajectory file holds at least one trajectory, got 0; check the file")
    return trajectories


def decoded_records(file: Path, format: FormatName = "auto") -> Iterator[tuple[str, list[Trajectory]]]:
    """The trajectories of each record with the record's place; see `read_trajectories`."""
    notes: Counter[str] = Counter()
    expected = None if format == "auto" else format
    num_records = 0
    for where, record in read_records(file):
        num_records += 1
        said: dict[str, None] = {}
        try:
            name = _format_of(record, expected, is_named=format != "auto")
            expected = expected or name
            found = _decode(record, name, said)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        except (RecursionError, OverflowError) as error:
            raise InputError(f"{where}: a record that cannot be read ({error}); repair it") from error
        notes.update(said)
        yield where, found
    for note, count in notes.items():
        warnings.warn(f"{file}: {note} ({count} of {num_records} records)", DataWarning, stacklevel=2)


def _decode(record: object, name: str, said: dict[str, None]) -> list[Trajectory]:
    assert isinstance(record, dict), "a format was found"

    def note(sentence: str) -> None:
        said[sentence] = None

    return _DECODERS[name](record, note)


def _format_of(record: object, expected: str | None, *, is_named: bool) -> str:
    if not isinstance(record, dict):
        raise InputError(f"a trajectory is a JSON object, got {show(record)}; write one object per line")
    if is_named:
        assert expected is not None, "a name was given"
        check_format(record, expected)
        return expected
    found = detect(record, _is_trace)
    # Both are chat records, with and without a task.
    if expected is not None and found != expected and {found, expected} != {"treering", "chat"}:
        raise InputError(f"a file has one format, and this record is {found} after {expected}; split the file")
    return found


def _is_trace(record: Mapping[str, Any]) -> bool:
    return False
