"""ShareGPT records: `conversations` of turns with `from` and `value`, as LLaMA-Factory and axolotl read them.

Source: data/README.md of LLaMA-Factory.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from treering.data.formats.adapters.trl_rows import preference_pair
from treering.data.formats.chat_messages import decode_messages, nested_tools
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, is_blank, number_field, parsed, text_field
from treering.data.formats.model_calls import ids_or_text
from treering.data.formats.record_format import Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError

_CALL = "function_call"
_PAIR = ("chosen", "rejected")


def decode_sharegpt(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the conversation of a record, or the two of a preference pair.

    A `function_call` turn is one call or a list of calls as JSON text; other text is kept as text.
    """
    check_readable(record, but=(*_PAIR, "system", "tools"))
    if not is_blank(record.get("kto_tag")):
        raise InputError("kto_tag is for KTO, which Treering lacks; keep the good ones and remove the key")
    system = None if is_blank(record.get("system")) else text_field(record, "system")
    begin = (Message(role="system", content=system),) if system else ()
    messages = (*begin, *_turns(record.get("conversations"), "conversations"))
    tools = nested_tools(record.get("tools"), "tools")
    if any(not is_blank(record.get(key)) for key in _PAIR):
        answers = [_turns([record.get(key)], key) for key in _PAIR]
        return preference_pair(record, note, messages, answers[0], answers[1], tools=tools)
    return [
        Trajectory(
            task_id=task_of(record, note, messages=messages),
            messages=messages,
            tools=tools,
            reward=number_field(record, "reward"),
        )
    ]


def _turns(value: object, name: str) -> tuple[Message, ...]:
    return decode_messages([_as_chat(turn, f"{name}[{i}]") for i, turn in enumerate(array(name, value))], name)


def _as_chat(turn: object, where: str) -> Mapping[str, Any]:
    turn = checked_object(where, turn, fields="from and value")
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if role is None:
        raise InputError(f"{where} needs from and value, got the keys {', '.join(turn) or 'none'}; add them")
    rest = {key: value for key, value in turn.items() if key not in ("from", "role", "value", "content")}
    if role != _CALL:
        return {**rest, "role": role, "content": content}
    calls = _calls(content, where)
    return {**rest, "role": "assistant", **({"content": content} if calls is None else {"tool_calls": calls})}


def _calls(content: object, where: str) -> list[Any] | None:
    """Return the calls in a JSON text; None if the text is not JSON."""
    text = text_field({"value": content}, "value", f"{where}.value") or ""
    if not text.strip().startswith(("{", "[")):
        return None
    calls = parsed(text, f"{where}, a function_call,")
    return calls if isinstance(calls, list) else [calls]


FORMATS = (
    RecordFormat(
        name="sharegpt",
        decode=partial(ids_or_text, decode=decode_sharegpt),
        keys=(("conversations",),),
        signs=((70, has_keys("conversations")),),
    ),
)
