"""Which task a record is of: by one of its keys, else by its first prompt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from treering.data.formats.codec import decode_task_id, first_prompt_id
from treering.data.trajectory import Message, TaskId
from treering.types import LossMask, TokenIds

Note: TypeAlias = Callable[[str], None]
"""Takes a sentence about a record that its owner should know; each is said once per file, with how many records."""

TASK_KEYS = ("task_id", "instance_id", "example_id", "prompt_id")
"""Keys that name a task, the first one counts; a row's own `id` or `uuid` names no task."""

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
    """The id under the first of `keys` that the record has; without one a hash of the first prompt, with a note.

    Raises:
        InputError: an id that is neither text nor an integer.

    Example: `{"id": "x1", "instance_id": "django-1"}` is of the task "django-1".
    """
    task_id = named_task(record, keys)
    if task_id is not None:
        return task_id
    note(NO_TASK)
    return first_prompt_id(messages, tokens, loss_mask)


def named_task(record: Mapping[str, Any], keys: Sequence[str] = TASK_KEYS) -> TaskId | None:
    """The id under the first of `keys` that the record has; None without one.

    Raises:
        InputError: an id that is neither text nor an integer.
    """
    return next((found for key in keys if (found := decode_task_id(record, key)) is not None), None)
