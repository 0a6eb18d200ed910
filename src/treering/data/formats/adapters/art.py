"""ART's trajectories of messages and choices.

Source: `Trajectory` of OpenPipe/ART.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.chat_messages import decode_messages, nested_tools
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, number_field
from treering.data.formats.record_format import Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import Message, Trajectory


def decode_art(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a trajectory of ART and its additional histories; choices are trained, other messages are context."""
    check_readable(record, but=("tools",))
    histories = [record, *array("additional_histories", record.get("additional_histories") or [])]
    found = [_history(one, "" if i == 0 else f"additional_histories[{i - 1}].") for i, one in enumerate(histories)]
    task_id = task_of(record, note, messages=found[0][0])
    reward = number_field(record, "reward")
    return [Trajectory(task_id=task_id, messages=messages, tools=tools, reward=reward) for messages, tools in found]


def _history(history: object, where: str) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    name = f"{where}messages_and_choices"
    given = checked_object(where[:-1], history, fields="messages_and_choices")
    messages = []
    for entry in array(name, given.get("messages_and_choices")):
        if isinstance(entry, dict) and "role" not in entry and entry.get("message") is not None:
            messages.append(entry["message"])
        elif isinstance(entry, dict) and entry.get("role") == "assistant":
            messages.append({**entry, "weight": 0})
        else:
            messages.append(entry)
    return decode_messages(messages, name), nested_tools(given.get("tools"), f"{where}tools")


FORMATS = (
    RecordFormat(
        name="art",
        decode=decode_art,
        keys=(("messages_and_choices",),),
        signs=((43, has_keys("messages_and_choices")),),
    ),
)
