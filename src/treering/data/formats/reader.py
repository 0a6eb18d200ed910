"""Reads trajectories from the files that people have, whatever holds the records and whatever format they have."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from treering.data.formats.adapters.agent_trainers import (
    decode_art,
    decode_nemo_rl,
    decode_prime_rl,
    decode_rllm,
    decode_skyrl,
)
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
from treering.data.formats.endings import CUT_TURN, FAILED_RUN, has_cut_turn, has_failed
from treering.data.formats.fields import placed, show
from treering.data.formats.pictures import with_pictures
from treering.data.formats.tasks import Note
from treering.data.formats.traces import TraceTally, decode_traces, looks_like_trace
from treering.data.trajectory import Trajectory
from treering.errors import DataWarning, InputError

FailedRuns: TypeAlias = Literal["left_out", "kept"]
"""What becomes of the records of failed runs."""
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
        "prime_rl": decode_prime_rl,
        "skyrl": decode_skyrl,
        "nemo_rl": decode_nemo_rl,
        "art": decode_art,
        "rllm": decode_rllm,
    }
)

_WITH_PICTURES = ("treering", "chat", "trl")


def read_trajectories(
    path: str | os.PathLike[str],
    format: FormatName = "auto",
    *,
    may_be_torn: bool = False,
    failed: FailedRuns = "left_out",
) -> list[Trajectory]:
    """All trajectories of a file or dataset folder, in its order.

    Read are JSON Lines, JSON documents, Parquet and Arrow files and Hugging Face datasets on disk, compressed or not:
    see `containers.read_records`. `docs/data.md` says what is read of each format.

    Args:
        path: the file, or the folder of a dataset.
        format: of the records; "auto" finds it from the keys of the first one. All records have the same.
        may_be_torn: a run wrote the file, and a kill may have cut its last line, which is left out then.
        failed: what becomes of records that say that their run failed; see `endings.has_failed`.

    Raises:
        InputError: a bad record, as "FILE:LINE: rule, value, fix"; a file that is missing, corrupt or empty.
        MissingExtraError: a table without pyarrow.

    Warns:
        DataWarning: something of the file that its owner should know, each sentence once.

    Example: a file with the line `{"task_id": "a", "tokens": [5, 6]}` gives one trajectory of two tokens.
    """
    file = Path(path)
    reader = RecordReader(str(file), format, failed)
    trajectories = [
        one for where, record in read_records(file, may_be_torn=may_be_torn) for one in reader.decode(where, record)
    ]
    reader.warn()
    if not trajectories:
        raise InputError(f"{file}: a trajectory file holds at least one trajectory, got 0; check the file")
    return trajectories


class RecordReader:
    """Decodes the records of one file, which all have one format, and collects what is to be said of it.

    Example: `RecordReader("a.jsonl").decode("a.jsonl:1", {"task_id": 1, "tokens": [5]})` is a list of one trajectory.
    """

    def __init__(self, source: str, format: FormatName = "auto", failed: FailedRuns = "left_out") -> None:
        """Takes the file's name, which begins the warnings; the other arguments are those of `read_trajectories`."""
        self._failed = failed
        self._source = source
        # Local pictures lie beside the file, or in the folder that is read as one set.
        self._folder = Path(source) if Path(source).is_dir() else Path(source).parent
        self._named = None if format == "auto" else format
        self._found: FormatName | None = None
        self._notes: Counter[str] = Counter()
        self._num_records = 0
        self._traces = TraceTally()

    def decode(self, where: str, record: object) -> list[Trajectory]:
        """The trajectories of a record; `where` begins the errors.

        Raises:
            InputError: a bad record.
        """
        self._num_records += 1
        said: dict[str, None] = {}

        def note(sentence: str) -> None:
            said[sentence] = None

        with placed(where):
            if not isinstance(record, dict):
                raise InputError(f"a trajectory is a JSON object, got {show(record)}; write one object per line")
            found = self._decode(record, self._format_of(record), note, where)
        self._notes.update(list(said))
        return found

    def forget(self) -> None:
        """Leaves unsaid what was to be said, as where a refusal says enough."""
        self._notes.clear()
        self._traces = TraceTally()

    def warn(self) -> None:
        """Says what the file's owner should know.

        Warns:
            DataWarning: each sentence once, with the number of records that it is about.
        """
        counted = [f"{note} ({count} of {self._num_records} records)" for note, count in self._notes.items()]
        for note in counted + self._traces.notes():
            warnings.warn(f"{self._source}: {note}", DataWarning, stacklevel=3)

    def _format_of(self, record: Mapping[str, Any]) -> FormatName:
        if self._named is not None:
            check_format(record, self._named)
            return self._named
        found = detect(record)
        # Both are chat records, with and without a task.
        if self._found not in (None, found) and {found, self._found} != {"treering", "chat"}:
            raise InputError(f"a file has one format, and this record is {found} after {self._found}; split the file")
        self._found = found
        return found

    def _decode(self, record: Mapping[str, Any], name: FormatName, note: Note, where: str) -> list[Trajectory]:
        if name in _WITH_PICTURES:
            record = with_pictures(record, self._folder, where, note)
        if name != "verifiers" or not looks_like_trace(record):
            found = _DECODERS[name](record, note)
            if found and self._failed == "left_out" and has_failed(record):
                note(FAILED_RUN)
                return []
            if has_cut_turn(record) and any(one.tokens is None for one in found):
                note(CUT_TURN)
                return [one for one in found if one.tokens is not None]
            return found
        traces = decode_traces(record)
        self._traces.add(traces)
        return [trajectory for trace in traces for trajectory in trace.trajectories()]
