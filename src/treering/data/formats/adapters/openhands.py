"""OpenHands' runs: a `history` of events, `messages`, or a logged call of its model.

Source: evaluation/utils/shared.py of OpenHands, its events, and those of its software agent SDK.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.adapters.chat import decode_chat
from treering.data.formats.adapters.openhands_events import conversations_of
from treering.data.formats.codec import check_readable
from treering.data.formats.fields import array, is_blank, number_field, show, text_field
from treering.data.formats.messages import decode_messages
from treering.data.formats.model_calls import as_context
from treering.data.formats.tasks import NO_ANSWER, Note, task_of
from treering.data.formats.tool_calls import nested_tools
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError

_EVENTS = ("history", "events", "trajectory")


def decode_openhands(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """The conversation of a run, and one more after each condensation of its history; a run without events is left out.

    Raises:
        InputError: a bad event, with its place.

    Example: the event of a user's message "Fix a.py" and an agent's call of `ls` train the call.
    """
    check_readable(record, but=("tools",))
    if isinstance(record.get("response"), dict):
        return [_logged_call(record, note)]
    if not is_blank(record.get("messages")):
        return decode_chat(record, note)
    key = next((key for key in _EVENTS if not is_blank(record.get(key))), None)
    if key is None:
        note(NO_ANSWER)
        return []
    events = [event for one in array(key, record[key]) for event in (one if isinstance(one, list) else [one])]
    found, tools = conversations_of(events, key, note)
    instruction = text_field(record, "instruction")
    if not any(message.role == "user" for message in found[0]) and instruction:
        found = [_with_instruction(messages, instruction) for messages in found]
    task_id = task_of(record, note, messages=found[0])
    return [Trajectory(task_id=task_id, messages=one, tools=tools, reward=_reward(record)) for one in found]


def _with_instruction(messages: tuple[Message, ...], instruction: str) -> tuple[Message, ...]:
    num_system = int(messages[0].role == "system")
    return (*messages[:num_system], Message(role="user", content=instruction), *messages[num_system:])


def _logged_call(record: Mapping[str, Any], note: Note) -> Trajectory:
    """The call that a file of `llm_completions` holds: only its answer is trained."""
    choices = record["response"].get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise InputError(f"response.choices holds one answer, got {show(choices)}; keep one of them")
    prompt = decode_messages(record.get("messages"))
    answer = decode_messages([choices[0].get("message")], "response.choices")
    options = record.get("kwargs")
    tools = record.get("tools") or (options.get("tools") if isinstance(options, dict) else None)
    messages = (*as_context(prompt), *answer)
    return Trajectory(
        task_id=task_of(record, note, messages=messages), messages=messages, tools=nested_tools(tools, "kwargs.tools")
    )


def _reward(record: Mapping[str, Any]) -> float | None:
    """1.0 for a resolved instance and 0.0 for another, where the run was evaluated."""
    result = record.get("test_result")
    places = (record, record.get("report"), result, result.get("report") if isinstance(result, dict) else None)
    for place in places:
        if isinstance(place, dict) and isinstance(place.get("resolved"), bool):
            return float(place["resolved"])
    return number_field(record, "reward")
