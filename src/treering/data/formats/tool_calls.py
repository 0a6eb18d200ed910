"""Tool calls and tool schemas of JSON records, in the spellings of the common APIs."""

import json
import math
from collections.abc import Mapping
from typing import Any

from treering.data.formats.fields import array, is_blank, parsed, show, text_field
from treering.data.trajectory import ToolCall
from treering.data.unicode import valid_text
from treering.errors import InputError

_ARGUMENT_KEYS = ("arguments", "args", "input", "parameters")
_OTHER_KEYS = frozenset({"id", "type", "index", "name", "call_id", "status", "caller", "cache_control"})


def decode_call(record: object, where: str) -> ToolCall:
    r"""A call, flat or nested under `function`; arguments that are text stay the text that the model wrote.

    Raises:
        InputError: no name, arguments under an unknown key, or of another type.

    Example: `{"id": "c1", "function": {"name": "f", "arguments": "{\"x\": 1}"}}` and
    `{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}` both call f with x = 1.
    """
    if not isinstance(record, dict):
        raise InputError(f"{where} must be an object with name and arguments, got {show(record)}; repair it")
    call = record.get("function", record)
    name = text_field(call, "name", f"{where}.name") if isinstance(call, dict) else None
    if not name:
        raise InputError(f"{where} needs the tool's name, flat or under function, got {show(record)}; add it")
    key = next((key for key in _ARGUMENT_KEYS if key in call), None)
    if key is None and (unknown := sorted(set(call) - _OTHER_KEYS)):
        raise InputError(f"{where} needs arguments, got the keys {', '.join(unknown)}; call that one arguments")
    return ToolCall(
        name=name,
        arguments={} if key is None else _arguments(call[key], f"{where}.{key}"),
        id=text_field(record, "call_id" if "call_id" in record else "id", f"{where}.id"),
    )


def decode_tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The schemas under `tools`, a list of objects or its JSON text, or of OpenAI's older `functions`.

    Raises:
        InputError: not a list of objects, or both fields.

    Example: `{"functions": [{"name": "f"}]}` has the tool `{"type": "function", "function": {"name": "f"}}`.
    """
    tools, functions = (_schemas(record.get(key), key) for key in ("tools", "functions"))
    if tools and functions:
        raise InputError("tools and functions both list the tools; keep one of them")
    return tools or tuple({"type": "function", "function": function} for function in functions)


def nested_tools(value: object, key: str) -> tuple[Mapping[str, Any], ...]:
    """Schemas as chat templates want them, nested under `function`, from nested or flat ones or their JSON text.

    Raises:
        InputError: not a list of objects, or a tool of another type than function.

    Example: `[{"name": "f", "parameters": {}}]` is one tool `{"type": "function", "function": {"name": "f",
    "parameters": {}}}`.
    """
    return tuple(_nested(tool, f"{key}[{i}]") for i, tool in enumerate(_schemas(value, key)))


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """The name in a schema, nested under `function` or flat; None if it has none."""
    inner = tool.get("function")
    name = (inner if isinstance(inner, dict) else tool).get("name")
    return name if isinstance(name, str) else None


def _schemas(value: object, key: str) -> tuple[Mapping[str, Any], ...]:
    if is_blank(value):
        return ()
    found = array(key, parsed(value, key))
    for i, tool in enumerate(found):
        if not isinstance(tool, dict):
            raise InputError(f"{key}[{i}] must be an object, the JSON schema of a tool, got {show(tool)}; repair it")
    return tuple(found)


def _nested(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    kind = tool.get("type") or "function"
    if kind != "function":
        raise InputError(f"{where} is a tool of type {show(kind)}, and only functions are read; remove it")
    if isinstance(tool.get("function"), dict):
        return tool
    if not tool.get("name"):
        raise InputError(f"{where} needs the tool's name, got {show(tool)}; add it")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _arguments(value: object, where: str) -> Mapping[str, Any] | str:
    if value is None:
        return {}
    if isinstance(value, str):
        # Models sometimes write broken JSON. It is training data, so the text is kept as it is.
        return valid_text(value, where)
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object or its JSON text, got {show(value)}; wrap it in an object")
    try:
        text = valid_text(json.dumps(value, ensure_ascii=False), where)
    except TypeError as error:
        # Columns of a table may hold bytes or times.
        raise InputError(f"{where} must be a JSON object, got {show(value)} ({error}); write them as text") from error
    # NaN and infinities are no JSON: as values they could not be written back.
    return text if _has_nan(value) else value


def _has_nan(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and not math.isfinite(value)
