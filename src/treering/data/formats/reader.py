"""Read trajectories from files of any supported container and format.

The sections are: runs that failed or ended in a truncated turn, the format of a record by its keys, and the reader.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from treering.data.formats.adapters import FORMATS
from treering.data.formats.chat_messages import ROLES
from treering.data.formats.containers import read_records
from treering.data.formats.json_fields import is_blank, object_in, placed, show
from treering.data.formats.record_format import Note
from treering.data.formats.record_images import with_images
from treering.data.trajectory import Trajectory
from treering.errors import DataWarning, InputError, plural

CUT_TURN = (
    "a turn was cut by a limit of tokens or a filter (finish_reason, stop_reason, status or is_truncated say so) and "
    "would be trained to end in the middle, so these are left out; give token ids to train them without an end"
)
"""Note on records that are skipped because of a truncated turn."""
FAILED_RUN = (
    "the record says that its run failed or was not completed (error, status, exit_status or is_completed say so), so "
    'these are left out; data.failed = "kept" of treering sft, or failed="kept" from Python, keeps them'
)
"""Note on records that are skipped because their run failed."""

CUT_FLAGS = ("is_truncated", "truncated", "was_truncated", "is_cut")
CUT_REASONS = ("finish_reason", "finishReason", "stop_reason", "done_reason", "finish_type", "termination_reason")
_LIMITS = frozenset(
    {
        "length",
        "max_tokens",
        "max_output_tokens",
        "max_length",
        "model_length",
        "token_limit",
        "max_response_length_exceeded",
        "content_filter",
    }
)
_TURNS = (
    "messages",
    "completion",
    "conversations",
    "conversation",
    "steps",
    "trajectory",
    "history",
    "output",
    "choices",
)
_INNER = ("response", "extra", "extra_info", "metadata", "response_metadata", "message", "info")


ERROR_KEYS = ("error", "errors", "error_message", "exception", "traceback", "has_error")
COMPLETED_KEYS = ("is_completed", "completed", "is_complete")
END_KEYS = (
    "status",
    "exit_status",
    "exit_reason",
    "termination_reason",
    "stop_reason",
    "stop_condition",
    "finish_reason",
)
_FAILURE = re.compile(
    r"\b(error(ed)?|fail(ed|ure)?|crash(ed)?|abort(ed)?|cancell?ed|time ?out|timed out|exception|interrupted|killed)\b"
)
_FAILURE_KEYS = frozenset((*ERROR_KEYS, *COMPLETED_KEYS, *END_KEYS))
_KNOWN_ROLES = frozenset(ROLES.values())
_CUT_KEYS = frozenset((*CUT_FLAGS, *CUT_REASONS, "incomplete_details", "status"))


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether a record's run ended in an error or was not completed, by its own fields.

    A low reward is not a failure, and neither is an error that a tool reported to the policy.

    Example: `{"messages": [...], "status": "timeout"}` has failed; `{"messages": [...], "reward": 0.0}` has not.
    """
    return any(_is_failed(part) for part in (record, *(object_in(record, key) for key in _INNER)))


def _is_failed(part: Mapping[str, Any]) -> bool:
    if _FAILURE_KEYS.isdisjoint(part):
        return False
    ends = [_words(part[key]) for key in END_KEYS if isinstance(part.get(key), str)]
    return (
        any(part.get(key) for key in ERROR_KEYS)
        # A table may store False as 0.
        or any(part.get(key) == 0 for key in COMPLETED_KEYS)
        or any(_FAILURE.search(end) for end in ends)
    )


def _words(text: str) -> str:
    """Return an identifier as lower-case words, such as "retry error" for RetryError."""
    return re.sub(r"[_\-.]+|(?<=[a-z])(?=[A-Z])", " ", text).lower()


def _parts(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a record and the turns of the policy in it; results of tools may be truncated too."""
    yield part
    for key in _INNER:
        if isinstance(part.get(key), dict):
            yield from _parts(part[key])
    for key in _TURNS:
        turns = part.get(key)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict):
                role = turn.get("role", turn.get("from", turn.get("source")))
                if role in (None, "agent") or ROLES.get(str(role).strip().lower()) == "assistant":
                    yield from _parts(turn)


def _is_cut(part: Mapping[str, Any]) -> bool:
    """Return whether a token limit or a filter truncated a turn."""
    if _CUT_KEYS.isdisjoint(part):
        return False
    reasons = [*(part.get(key) for key in CUT_REASONS), object_in(part, "incomplete_details").get("reason")]
    return (
        any(part.get(key) is True or part.get(key) == 1 for key in CUT_FLAGS)
        or any(isinstance(reason, str) and reason.lower() in _LIMITS for reason in reasons)
        or part.get("status") in ("incomplete", "truncated")
    )


if TYPE_CHECKING:
    FormatName: TypeAlias = str
else:
    FormatName = Literal[("auto", *FORMATS)]
    """Name of a record format; "auto" detects it from the keys."""

_OTHER: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"instruction", "output"}),
        "it is Alpaca's; write instruction and input as prompt, output as completion",
    ),
    (frozenset({"role", "content"}), 'it is one message; write a conversation as {"messages": [...]} in one record'),
    (frozenset({"from", "value"}), 'it is one turn; write a conversation as {"conversations": [...]} in one record'),
    (frozenset({"source", "action"}), 'it is one event of OpenHands; write a run as {"history": [...]} in one record'),
    (frozenset({"source", "observation"}), 'it is one event of OpenHands; write a run as {"history": [...]}'),
    (frozenset({"type", "function"}), "it is the schema of a tool; give it as one of the tools of a trajectory"),
    (frozenset({"text"}), "it is a text in which nothing says what the policy wrote; give prompt and completion"),
    (frozenset({"question"}), "it is of a prompts file for `treering train`; a trajectory has the response too"),
    (frozenset({"prompt", "length"}), "it is of a log of lengths for `treering simulate`; a trajectory has the text"),
    (frozenset({"prompt"}), "it is of a prompts file for `treering train`; a trajectory has the completion too"),
    (frozenset({"responses_create_params"}), "it is of NeMo Gym's prompts; a rollout has the response too"),
)


def detect(record: Mapping[str, Any]) -> FormatName:
    """Return the format of a record; keys with blank values do not count.

    Raises:
        InputError: no format matches; the message has the record's keys, the nearest format and the missing keys.

    Example: `{"conversations": [...]}` is "sharegpt".
    """
    filled_keys = {key for key, value in record.items() if not is_blank(value)}
    for sign, name in _SIGNS:
        if sign(record, filled_keys):
            return name
    raise InputError(_unknown(record, filled_keys))


_SIGNS = [
    (sign, name)
    for _, name, sign in sorted(
        ((rank, one.name, sign) for one in FORMATS.values() for rank, sign in one.signs), key=lambda rule: rule[0]
    )
]


def _check_format(record: Mapping[str, Any], name: FormatName) -> None:
    groups = FORMATS[name].keys
    if FORMATS[name].has_traces(record) or any(record.keys() >= set(group) for group in groups):
        return
    missing = [key for key in groups[0] if key not in record]
    raise InputError(
        f'format "{name}" needs {" and ".join(groups[0])}, got the keys {_names(record)} without '
        f'{" and ".join(missing)}; give the format that the file has, or "auto"'
    )


def _unknown(record: Mapping[str, Any], keys: set[str]) -> str:
    begin = f"no format has a record with the keys {_names(record)}"
    if hint := next((hint for group, hint in _OTHER if group <= keys), None):
        return f"{begin}: {hint}"
    if nearest := _nearest(set(record), keys):
        return f"{begin}; {nearest}"
    common = ((name, FORMATS[name].keys) for name in ("treering", "chat", "sharegpt", "trl"))
    formats = "; ".join(f"{name} has {' and '.join(groups[0])}" for name, groups in common)
    return f"{begin}: {formats}; write it as one of these"


def _nearest(keys: set[str], filled: set[str]) -> str | None:
    """Return a sentence on the format that shares most keys; None if no format shares a key."""
    shares = [(len(keys.intersection(one.keys[0])) / len(one.keys[0]), name) for name, one in FORMATS.items()]
    share, name = max(shares, key=lambda pair: pair[0])
    if share:
        missing = [key for key in FORMATS[name].keys[0] if key not in filled]
        return f"it looks most like {name}, and {' and '.join(missing)} is missing or empty; add it"
    return None


def _names(record: Mapping[str, Any]) -> str:
    return show(", ".join(map(str, record))).strip("'\"") if record else "none"


FailedRuns: TypeAlias = Literal["left_out", "kept"]
"""Whether records of failed runs are skipped or kept."""
Adapter: TypeAlias = Callable[[Any], Mapping[str, Any] | list[Mapping[str, Any]]]
"""Converts a record to a record of a known format, or to a list of them; an empty list drops the record."""


def read_trajectories(
    path: str | os.PathLike[str],
    format: FormatName = "auto",
    *,
    may_be_torn: bool = False,
    failed: FailedRuns = "left_out",
    adapter: Adapter | None = None,
) -> list[Trajectory]:
    """Read all trajectories of a file or dataset folder, in order.

    The path may be JSON Lines, a JSON document, a Parquet or Arrow file or a Hugging Face dataset on disk, also
    compressed, see `containers.read_records`. `docs/data.md` lists what is read of each format.

    Args:
        path: the file, or the folder of a dataset.
        format: format of all records; "auto" detects it from the keys.
        may_be_torn: whether a kill may have cut the last line of the file, which is then skipped.
        failed: whether records of failed runs are skipped or kept; see `has_failed`.
        adapter: called with each record; the record or list of records that it returns is read instead.

    Raises:
        InputError: a record is bad, as "FILE:LINE: rule, value, fix"; or the file is missing, corrupt or empty.
        MissingExtraError: the file is a table, and pyarrow is missing.

    Warns:
        DataWarning: a property of the file that its owner should know; each warning is given once.

    Example: a file with the line `{"task_id": "a", "tokens": [5, 6]}` gives one trajectory of two tokens.
    """
    file = Path(path)
    reader = RecordReader(str(file), format, failed, adapter)
    trajectories = [
        one for where, record in read_records(file, may_be_torn=may_be_torn) for one in reader.decode(where, record)
    ]
    reader.warn()
    if not trajectories:
        raise InputError(f"{file}: a trajectory file holds at least one trajectory, got 0; check the file")
    return trajectories


class RecordReader:
    """Decoder of the records of one file, which all have one format; collects warnings about the file."""

    def __init__(
        self,
        source: str,
        format: FormatName = "auto",
        failed: FailedRuns = "left_out",
        adapter: Adapter | None = None,
    ) -> None:
        """Set up a reader.

        `source` is the file's name, with which warnings begin. The other arguments are those of `read_trajectories`.
        """
        if format not in ("auto", *FORMATS):
            raise InputError(f"format is auto or one of {', '.join(FORMATS)}, got {format!r}; correct it")
        self._failed, self._adapter = failed, adapter
        self._source = source
        # Local images are next to the file, or in the folder that is read.
        self._folder = Path(source) if Path(source).is_dir() else Path(source).parent
        self._named = None if format == "auto" else format
        self._found: FormatName | None = None
        self._notes: Counter[str] = Counter()
        self._num_records = 0
        self._tallies: dict[type[Any], Any] = {}

    def decode(self, where: str, record: object) -> list[Trajectory]:
        """Return the trajectories of a record; errors begin with `where`."""
        self._num_records += 1
        note = Note(self._tallies)
        found: list[Trajectory] = []
        with placed(where):
            for one in [record] if self._adapter is None else self._adapted(record):
                if not isinstance(one, dict):
                    raise InputError(f"a trajectory is a JSON object, got {show(one)}; write one object per line")
                found += self._decode(one, self._format_of(one), note, where)
        self._notes.update(list(note.sentences))
        for trajectory in found:
            # `replace` would check all fields again.
            object.__setattr__(trajectory, "where", where)
        return found

    def forget(self) -> None:
        """Discard the collected warnings, for example because an error is raised."""
        self._notes.clear()
        self._tallies.clear()

    def warn(self) -> None:
        """Give the collected warnings."""
        counted = [f"{note} ({count} of {plural(self._num_records, 'record')})" for note, count in self._notes.items()]
        for note in counted + [sentence for tally in self._tallies.values() for sentence in tally.notes()]:
            warnings.warn(f"{self._source}: {note}", DataWarning, stacklevel=3)

    def _adapted(self, record: object) -> list[Any]:
        assert self._adapter is not None, "it is called with an adapter"
        try:
            found = self._adapter(record)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"the adapter raised {type(error).__name__}: {error}; correct it") from error
        return found if isinstance(found, list) else [found]

    def _format_of(self, record: Mapping[str, Any]) -> FormatName:
        if self._named is not None:
            _check_format(record, self._named)
            return self._named
        found = detect(record)
        # Chat records with and without a task share a decoder.
        if self._found is not None and FORMATS[found].decode is not FORMATS[self._found].decode:
            raise InputError(f"a file has one format, and this record is {found} after {self._found}; split the file")
        self._found = found
        return found

    def _decode(self, record: Mapping[str, Any], name: FormatName, note: Note, where: str) -> list[Trajectory]:
        known = FORMATS[name]
        if known.has_images:
            record = with_images(record, self._folder, where, note)
        found = known.decode(record, note)
        for role in {message.role for one in found for message in one.messages or ()} - _KNOWN_ROLES:
            note(f"the role {role!r:.40} is not known, so its messages are context")
        if known.has_traces(record):
            return found
        if found and self._failed == "left_out" and has_failed(record):
            note(FAILED_RUN)
            return []
        if any(map(_is_cut, _parts(record))) and any(one.tokens is None for one in found):
            note(CUT_TURN)
            return [one for one in found if one.tokens is not None]
        return found


def find_location(path: Path, format: FormatName, index: int, *, failed: FailedRuns) -> str:
    """Return the location, such as FILE:LINE, of the trajectory with an index in a file that was read before."""
    reader, num_read = RecordReader(str(path), format, failed), 0
    for where, record in read_records(path):
        num_read += len(reader.decode(where, record))
        if num_read > index:
            return where
    return str(path)
