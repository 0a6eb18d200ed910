"""The description of a format, and helpers of decoders: notes to the owner of a file, and the task of a record."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from treering.data.formats.codec import decode_task_id, first_prompt_id
from treering.data.trajectory import Message, TaskId, Trajectory
from treering.types import LossMask, TokenIds


class Note:
    """Collector of notes on one record that the owner of its file should know.

    Each sentence is reported once per file, with the number of its records.
    """

    def __init__(self, tallies: dict[type[Any], Any]) -> None:
        self.sentences: dict[str, None] = {}
        self.tallies = tallies
        """Counts over all records of the file by class; `notes` of each returns further sentences."""

    def __call__(self, sentence: str) -> None:
        """Keep a sentence."""
        self.sentences[sentence] = None


Decode: TypeAlias = Callable[[Mapping[str, Any], Note], list[Trajectory]]
"""Returns the trajectories of a record, or raises InputError with the field, its value and the rule."""
Sign: TypeAlias = Callable[[Mapping[str, Any], Set[str]], bool]
"""Returns whether a record has a format, from the record and its keys with values that are not blank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """A format of records.

    A new format needs a module in `adapters` that lists it in `FORMATS`, a record in `tests/data/formats/reading.py`,
    and a row in docs/data.md.

    Example: `adapters/verl.py`.
    """

    name: str
    """Name in `format` and on the command line."""
    decode: Decode
    keys: tuple[tuple[str, ...], ...]
    """Groups of keys; a record has all keys of at least one group. Errors name the first group."""
    signs: tuple[tuple[int, Sign], ...]
    """Rules that recognise a record, each with a rank. If rules of several formats hold, the lowest rank wins.

    Ranks in use are between 10 and 101: `grep -rn signs= adapters`."""
    has_images: bool = False
    """Whether images in messages are read; see `record_images.with_images`."""
    has_traces: Callable[[Mapping[str, Any]], bool] = lambda record: False
    """Whether a record holds traces, which have other keys and their own marks of failed and truncated runs."""


def has_keys(*keys: str) -> Sign:
    """Return a rule that holds if all keys have values."""
    return lambda record, filled: filled >= set(keys)


TASK_KEYS = ("task_id", "instance_id", "example_id", "prompt_id")
"""Keys that name a task, in order of precedence; the `id` or `uuid` of a row does not name a task."""

NO_TASK = "no task is named, so those with equal first prompts are trials of one task"

NO_ANSWER = "nothing was sampled, so these are left out"


def task_of(
    record: Mapping[str, Any],
    note: Note,
    *,
    messages: tuple[Message, ...] | None = None,
    tokens: TokenIds | None = None,
    loss_mask: LossMask | None = None,
    keys: Sequence[str] = TASK_KEYS,
) -> TaskId:
    """Return the id under the first of `keys` that the record has; else a hash of the first prompt, with a note.

    Example: the task of `{"id": "x1", "instance_id": "django-1"}` is "django-1".
    """
    task_id = named_task(record, keys)
    if task_id is not None:
        return task_id
    note(NO_TASK)
    return first_prompt_id(messages, tokens, loss_mask)


def named_task(record: Mapping[str, Any], keys: Sequence[str] = TASK_KEYS) -> TaskId | None:
    """Return the id under the first of `keys` that the record has; None if it has none."""
    return next((found for key in keys if (found := decode_task_id(record, key)) is not None), None)
