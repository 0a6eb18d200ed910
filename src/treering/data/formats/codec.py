"""Trajectories to and from JSON values: field names, types, and both spellings of tool calls."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.trajectory import Message, TaskId, ToolCall, Trajectory
from treering.errors import InputError
from treering.types import MAX_TOKEN_ID, LossMask, TokenIds

_SCALARS = ("trial", "reward", "advantage", "step", "epoch", "version")


def decode(record: object) -> Trajectory:
    """Parses a trajectory; null fields count as absent, unknown ones are ignored.

    Raises:
        InputError: a bad field; the message has its name, value and rule.

    Example: `decode({"task_id": 3, "tokens": [5, 6], "loss_mask": [0, 1], "source": "x"}).loss_mask` is
    `[False, True]`.
    """
    if not isinstance(record, dict):
        raise InputError(f"a trajectory is a JSON object, got {_show(record)}; write one object per line")
    messages, tokens = record.get("messages"), record.get("tokens")
    loss_mask, logprobs = record.get("loss_mask"), record.get("logprobs")
    return Trajectory(
        task_id=_task_id(record),
        messages=None if messages is None else _messages(messages),
        tokens=None if tokens is None else _token_ids(tokens),
        loss_mask=None if loss_mask is None else _loss_mask(loss_mask),
        logprobs=None if logprobs is None else _logprobs(logprobs),
        format=_text(record, "format", "format") or "chat",
        trial=_integer(record, "trial"),
        reward=_number(record, "reward"),
        advantage=_number(record, "advantage"),
        step=_integer(record, "step"),
        epoch=_integer(record, "epoch"),
        version=_integer(record, "version"),
    )


def encode(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON value of a trajectory, without fields that are None; `decode` reads it back.

    Example: a trajectory of task 3 with tokens 5 and 6 becomes `{"task_id": 3, "format": "chat", "tokens": [5, 6]}`.
    """
    record: dict[str, Any] = {"task_id": trajectory.task_id, "format": trajectory.format}
    for key in _SCALARS:
        record[key] = getattr(trajectory, key)
    if trajectory.messages is not None:
        record["messages"] = [_encode_message(message) for message in trajectory.messages]
    for key in ("tokens", "loss_mask", "logprobs"):
        values = getattr(trajectory, key)
        record[key] = None if values is None else values.tolist()
    return {key: value for key, value in record.items() if value is not None}


def _encode_message(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    for key in ("name", "tool_call_id"):
        if getattr(message, key) is not None:
            record[key] = getattr(message, key)
    if message.tool_calls:
        record["tool_calls"] = [_encode_call(call) for call in message.tool_calls]
    return record


def _encode_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    record: dict[str, Any] = {"name": call.name, "arguments": arguments}
    return record if call.id is None else {"id": call.id, **record}


def _messages(value: object) -> tuple[Message, ...]:
    return tuple(_message(i, record) for i, record in enumerate(_array("messages", value)))


def _message(index: int, record: object) -> Message:
    where = f"messages[{index}]"
    if not isinstance(record, dict):
        raise InputError(f"{where} must be an object with role and content, got {_show(record)}; repair it")
    role = _text(record, "role", f"{where}.role")
    if not role:
        raise InputError(f"{where} needs a role, got {_show(record.get('role'))}; add one")
    calls = _array(f"{where}.tool_calls", record.get("tool_calls") or [])
    return Message(
        role=role,
        content=_content(record.get("content"), f"{where}.content"),
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        name=_text(record, "name", f"{where}.name"),
        tool_call_id=_text(record, "tool_call_id", f"{where}.tool_call_id"),
    )


def _content(value: object, where: str) -> str | None:
    if not isinstance(value, list):
        return _text({"content": value}, "content", where)
    parts = [_text(part, "text", where) if isinstance(part, dict) else None for part in value]
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        raise InputError(f"{where} may be a list of text parts only, got {_show(value)}; remove the other parts")
    return "".join(texts)


def _call(record: object, where: str) -> ToolCall:
    if not isinstance(record, dict):
        raise InputError(f"{where} must be an object with name and arguments, got {_show(record)}; repair it")
    call = record.get("function", record)
    name = _text(call, "name", f"{where}.name") if isinstance(call, dict) else None
    if not name:
        raise InputError(f"{where} needs the tool's name, flat or under function, got {_show(record)}; add it")
    arguments = _arguments(call.get("arguments"), f"{where}.arguments")
    return ToolCall(name=name, arguments=arguments, id=_text(record, "id", f"{where}.id"))


def _arguments(value: object, where: str) -> Mapping[str, Any] | str:
    if value is None:
        return {}
    if isinstance(value, dict):
        _valid(json.dumps(value, ensure_ascii=False), where)
        return value
    if not isinstance(value, str):
        raise InputError(f"{where} must be an object or its JSON text, got {_show(value)}; wrap it in an object")
    # Models sometimes write broken JSON. It is training data, so the text is kept as it is.
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return _arguments(parsed, where) if isinstance(parsed, dict) else _valid(value, where)


def _task_id(record: Mapping[str, Any]) -> TaskId:
    value = record.get("task_id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InputError(f"task_id must be a string or an integer, got {_show(value)}; name each one's task")
    return value


def _text(record: Mapping[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"{where} must be text, got {_show(value)}; quote it or drop it")
    return _valid(value, where)


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} must be valid Unicode, got {_show(text)} ({error.reason}); repair it") from error
    return text


def _integer(record: Mapping[str, Any], key: str) -> int | None:
    value = record.get(key)
    if value is not None and type(value) is not int:
        raise InputError(f"{key} must be an integer, got {_show(value)}; correct it or drop it")
    return value


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{key} must be a number, got {_show(value)}; correct it or drop it")
    return float(value)


def _array(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, got {_show(value)}; wrap it in one")
    return value


def _token_ids(value: object) -> TokenIds:
    for i, token in enumerate(_array("tokens", value)):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise InputError(f"tokens[{i}] must be an integer in [0, {MAX_TOKEN_ID}], got {_show(token)}; correct it")
    return np.array(value, dtype=np.int32)


def _loss_mask(value: object) -> LossMask:
    for i, entry in enumerate(_array("loss_mask", value)):
        if type(entry) not in (int, bool) or entry not in (0, 1):
            raise InputError(f"loss_mask[{i}] must be 0, 1, true or false, got {_show(entry)}; correct it")
    return np.array(value, dtype=np.bool_)


def _logprobs(value: object) -> npt.NDArray[np.float64]:
    for i, entry in enumerate(_array("logprobs", value)):
        if type(entry) not in (int, float):
            raise InputError(f"logprobs[{i}] must be a number, got {_show(entry)}; use 0.0 where unsampled")
    return np.array(value, dtype=np.float64)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
