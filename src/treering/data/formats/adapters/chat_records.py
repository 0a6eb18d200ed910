"""Chat records: Treering's own format, and OpenAI's fine-tuning format, which names no task."""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.codec import decode
from treering.data.formats.json_fields import TOKEN_KEYS, is_blank, parsed
from treering.data.formats.model_calls import ids_or_text
from treering.data.formats.record_format import NO_TASK, Note, RecordFormat, named_task
from treering.data.trajectory import Trajectory
from treering.errors import InputError


def decode_chat(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode messages or tokens, see `codec.decode`; `messages` may be the JSON text of the list."""
    if isinstance(record.get("messages"), str):
        record = {**record, "messages": parsed(record["messages"], "messages")}
    for key in ("completion", "response"):
        if not is_blank(record.get("messages")) and not is_blank(record.get(key)):
            raise InputError(
                f"{key} stands next to messages, and only one of them can be trained; add it to messages, or remove it"
            )
    task_id = named_task(record)
    if task_id is None:
        note(NO_TASK)
    return [decode({**record, "task_id": task_id})]


def _decode(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    return decode_chat(record, note) if is_blank(record.get("messages")) else ids_or_text(record, note, decode_chat)


FORMATS = (
    RecordFormat(
        name="treering",
        decode=_decode,
        keys=(("task_id", "messages"), ("messages",), *((key,) for key in TOKEN_KEYS)),
        # Without messages and tokens the decoder reports what is missing.
        signs=((100, lambda record, filled: not filled.isdisjoint(("task_id", *TOKEN_KEYS))),),
        has_images=True,
    ),
    RecordFormat(
        name="chat",
        decode=_decode,
        keys=(("messages",),),
        signs=((101, lambda record, filled: "messages" in record),),
        has_images=True,
    ),
)
