"""Chat records: Treering's own form, and OpenAI's fine-tuning form, which names no task."""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.codec import decode
from treering.data.formats.fields import is_blank, parsed
from treering.data.formats.tasks import NO_TASK, Note, named_task
from treering.data.trajectory import Trajectory
from treering.errors import InputError


def decode_chat(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """The trajectory of messages or tokens, see `codec.decode`; `messages` may be the JSON text of the list.

    Raises:
        InputError: a bad field, by its name.

    Example: `{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}` trains
    "Hello".
    """
    if isinstance(record.get("messages"), str):
        record = {**record, "messages": parsed(record["messages"], "messages")}
    for key in ("completion", "response"):
        if not is_blank(record.get("messages")) and not is_blank(record.get(key)):
            raise InputError(
                f"{key} stands beside messages, and only one of them would be trained; add it to messages, or remove it"
            )
    task_id = named_task(record)
    if task_id is None:
        note(NO_TASK)
    return [decode({**record, "task_id": task_id})]
