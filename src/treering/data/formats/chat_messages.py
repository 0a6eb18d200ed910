"""Chat messages of JSON records: roles, contents, reasoning, tool calls, and which messages are trained.

The sections are: tool calls and schemas, items of OpenAI's Responses API, contents that are lists of parts, messages.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from treering.data.formats.json_fields import (
    array,
    checked_object,
    filled,
    is_blank,
    object_in,
    parsed,
    show,
    text_field,
)
from treering.data.formats.record_images import IMAGE_PART
from treering.data.image import ImageSource, MessageImage
from treering.data.trajectory import Message, ToolCall, valid_text
from treering.errors import InputError

_ARGUMENT_KEYS = ("arguments", "args", "input", "parameters")
_OTHER_KEYS = frozenset({"id", "type", "index", "name", "call_id", "status", "caller", "cache_control"})


def decode_call(record: object, where: str) -> ToolCall:
    r"""Decode a call, flat or nested under `function`; arguments that are text are kept as the model wrote them.

    Raises:
        InputError: the name is missing, or arguments are under an unknown key or of another type.

    Example: `{"id": "c1", "function": {"name": "f", "arguments": "{\"x\": 1}"}}` and
    `{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}` both call f with x = 1.
    """
    record = checked_object(where, record, fields="name and arguments")
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
    """Return the schemas under `tools`, a list of objects or its JSON text, or under OpenAI's older `functions`.

    Raises:
        InputError: the value is not a list of objects, or both fields are given.

    Example: `{"functions": [{"name": "f"}]}` has the tool `{"type": "function", "function": {"name": "f"}}`.
    """
    tools, functions = (_schemas(record.get(key), key) for key in ("tools", "functions"))
    if tools and functions:
        raise InputError("tools and functions both list the tools; keep one of them")
    return tools or tuple({"type": "function", "function": function} for function in functions)


def nested_tools(value: object, key: str) -> tuple[Mapping[str, Any], ...]:
    """Return tool schemas nested under `function`, as chat templates take them; `value` may be their JSON text.

    Raises:
        InputError: the value is not a list of objects, or a tool is not a function.

    Example: `[{"name": "f", "parameters": {}}]` is one tool `{"type": "function", "function": {"name": "f",
    "parameters": {}}}`.
    """
    return tuple(_nested(tool, f"{key}[{i}]") for i, tool in enumerate(_schemas(value, key)))


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """Return the name in a nested or flat tool schema; None if it has none."""
    inner = tool.get("function")
    name = (inner if isinstance(inner, dict) else tool).get("name")
    return name if isinstance(name, str) else None


def _schemas(value: object, key: str) -> tuple[Mapping[str, Any], ...]:
    if is_blank(value):
        return ()
    tools = array(key, parsed(value, key))
    return tuple(checked_object(f"{key}[{i}]", tool, fields="a tool's JSON schema") for i, tool in enumerate(tools))


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
        # Models sometimes write broken JSON, which is trained as it is.
        return valid_text(value, where)
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object or its JSON text, got {show(value)}; wrap it in an object")
    try:
        text = valid_text(json.dumps(value, ensure_ascii=False), where)
    except TypeError as error:
        # A column of a table may hold bytes or times.
        raise InputError(f"{where} must be a JSON object, got {show(value)} ({error}); write them as text") from error
    # JSON cannot write NaN and infinities, so they stay text.
    return text if _has_nan(value) else value


def _has_nan(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and not math.isfinite(value)


_STAMPS = ("id", "status", "type")


def _merge_items(records: Iterable[object], name: str) -> list[object]:
    """Return chat messages, with consecutive reasoning, text and calls joined to one assistant message.

    A `message` item is a chat message. Records that are not items stay as they are.

    Example: a `reasoning` item and a `function_call` item become one message with `reasoning_content` and `tool_calls`.
    """
    messages: list[object] = []
    answer: dict[str, Any] | None = None
    for i, record in enumerate(records):
        kind, where = _kind(record), f"{name}[{i}]"
        if kind is None or not isinstance(record, dict) or (kind == "message" and record["role"] != "assistant"):
            messages.append(record)
            answer = None
        elif kind == "function_call_output":
            if "output" not in record:
                raise InputError(f"{where} is a function_call_output and needs output, got {', '.join(record)}; add it")
            messages.append({"role": "tool", "tool_call_id": record.get("call_id"), "content": record["output"]})
            answer = None
        else:
            # A message has reasoning, text and calls in this order.
            if answer is None or (
                kind in ("reasoning", "message") and (answer["content"] is not None or answer.get("tool_calls"))
            ):
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            _add_item(answer, kind, record, where)
    return messages


def _kind(record: object) -> str | None:
    if not isinstance(record, dict):
        return None
    kind = record.get("type")
    if kind in (None, "message"):
        return "message" if "role" in record else None
    return kind if isinstance(kind, str) and "role" not in record else None


def _add_item(answer: dict[str, Any], kind: str, record: Mapping[str, Any], where: str) -> None:
    if kind == "message":
        answer.update({key: value for key, value in record.items() if key not in _STAMPS})
    elif kind == "reasoning":
        if thought := _thought(record, where):
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = thought if before is None else f"{before}\n\n{thought}"
    elif kind == "function_call":
        call = {key: record.get(key) for key in ("name", "arguments")}
        answer.setdefault("tool_calls", []).append({"id": record.get("call_id") or record.get("id"), **call})
    else:
        raise InputError(
            f"{where} is an item of type {show(kind)}, and Treering reads message, reasoning, function_call and "
            "function_call_output; remove the trajectory"
        )


def _thought(record: Mapping[str, Any], where: str) -> str:
    # Providers that withhold the content give a summary.
    parts = record.get("content") or record.get("summary") or []
    texts = [
        part.get("text") if isinstance(part, dict) else part for part in (parts if isinstance(parts, list) else [])
    ]
    if not texts and record.get("encrypted_content"):
        raise InputError(
            f"{where} is reasoning that is encrypted, so what the policy wrote is unknown; drop the record"
        )
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise InputError(f"{where} is reasoning whose parts need text, got {show(parts)}; repair it")
    return "\n\n".join(known)


@dataclass(slots=True, kw_only=True)
class Content:
    """Fields of a message that the parts of its content give."""

    text: str | None = None
    images: list[MessageImage] = field(default_factory=list)
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    """Results of tools, as messages."""


def decode_content(value: object, where: str) -> Content:
    """Decode the content of a message: text, one part, a list of parts, or null.

    Texts of one kind are concatenated.

    Raises:
        InputError: a part has an unknown type, or the parts are not in the order reasoning, text, tool calls.

    Example: `[{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Hi"}]` has the text "Hi" and the
    reasoning "Hm.".
    """
    content = Content()
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        content.text = text_field({"content": value}, "content", where)
        return content
    for i, part in enumerate(value):
        _add(content, part, f"{where}[{i}]")
    return content


def _add(content: Content, part: object, where: str) -> None:
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise InputError(f"{where} must be text or an object with a type, got {show(part)}; repair it")
    kind = part.get("type", "text" if "text" in part else None)
    add = _KINDS.get(kind) if isinstance(kind, str) else None
    if add is None:
        raise InputError(
            f"{where} is a part of type {show(kind)}, and Treering trains on text, and on images in the formats "
            f"treering, chat and trl: {', '.join(_KINDS)}; remove the part or the trajectory"
        )
    add(content, part, where)


def _add_text(content: Content, part: Mapping[str, Any], where: str) -> None:
    text = _required(part, ("refusal",) if part.get("type") == "refusal" else ("text",), where)
    if text and content.tool_calls:
        raise InputError(f"{where} is text after a tool call, and a message has its text first; split the message")
    content.text = (content.text or "") + text


def _add_image(content: Content, part: Mapping[str, Any], where: str) -> None:
    source = part.get(IMAGE_PART)
    if not isinstance(source, ImageSource):
        raise InputError(f'{where} is an image as {{"type": "image_url", ...}}, got {show(part)}; write it so')
    if content.tool_calls:
        raise InputError(f"{where} is an image after a tool call, and a message has its calls last; split the message")
    content.text = content.text or ""
    content.images.append(MessageImage(at=len(content.text), source=source))


def _add_reasoning(content: Content, part: Mapping[str, Any], where: str) -> None:
    nested = part.get("summary") or part.get("content")
    if isinstance(nested, list):
        text = "\n\n".join(_required(one, ("text",), where) for one in nested if isinstance(one, dict))
    else:
        text = _required(part, ("text", "thinking", "reasoning", "content"), where)
    if text and (content.text or content.tool_calls):
        raise InputError(
            f"{where} is reasoning after text or a tool call, and a message has its reasoning first; split the message"
        )
    content.reasoning = (content.reasoning or "") + text


def _add_call(content: Content, part: Mapping[str, Any], where: str) -> None:
    content.tool_calls.append(decode_call({key: value for key, value in part.items() if key != "type"}, where))


def _add_result(content: Content, part: Mapping[str, Any], where: str) -> None:
    inner = decode_content(part.get("content"), f"{where}.content")
    if content.text or content.images:
        raise InputError(
            f"{where} is a tool's result after text, and a message has its results first; split the message"
        )
    if inner.reasoning or inner.tool_calls or inner.results or inner.images:
        raise InputError(f"{where} is a tool's result and holds text only, got {show(part)}; remove the other parts")
    call_id = text_field(part, "tool_use_id", f"{where}.tool_use_id")
    content.results.append(Message(role="tool", content=inner.text or "", tool_call_id=call_id))


def _required(part: Mapping[str, Any], keys: tuple[str, ...], where: str) -> str:
    key = next((key for key in keys if not is_blank(part.get(key))), keys[0])
    text = text_field(part, key, f"{where}.{key}")
    if text is None:
        raise InputError(f"{where} needs its text under {' or '.join(keys)}, got {show(part)}; add it")
    return text


_Adder = Callable[[Content, Mapping[str, Any], str], None]
_KINDS: Mapping[str, _Adder] = {
    **dict.fromkeys(("text", "input_text", "output_text", "refusal"), _add_text),
    **dict.fromkeys(("reasoning", "thinking", "reasoning_text", "summary_text"), _add_reasoning),
    IMAGE_PART: _add_image,
    "tool_use": _add_call,
    "tool_result": _add_result,
}


ROLES: Mapping[str, str] = MappingProxyType(
    {
        **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
        **dict.fromkeys(("gpt", "model", "ai", "bot", "chatgpt"), "assistant"),
        **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), "tool"),
        "human": "user",
    }
)
"""Treering's name of each known role in lower case; other names stay as they are."""

TRAINED_KEYS = (
    *(
        "weight",
        "loss_weight",
        "loss_scale",
        "loss_mask",
        "step_loss_mask",
        "loss",
        "has_loss",
        "is_loss",
        "compute_loss",
    ),
    *("train", "trainable", "training", "trained", "is_trained", "train_on", "learn", "supervise"),
)
"""Names of a message's flag that trains it if true or 1, and makes it context if false or 0."""
CONTEXT_KEYS = ("no_loss", "ignore_loss", "mask_loss", "skip_loss", "ignore")
"""Names of a message's flag that makes it context if true or 1."""
ABOUT_TRAINING = ("train", "loss", "mask", "learn", "ignore", "skip", "supervise")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
UNREADABLE = MappingProxyType(
    {
        **dict.fromkeys(("images", "image"), 'an image is a part of the content, such as {"type": "image_url", ...}'),
        **dict.fromkeys(("videos", "video", "audio", "audios"), "Treering trains on text and images"),
        **dict.fromkeys(("training_detail", "train_detail"), "a message is trained whole or not at all"),
        **dict.fromkeys(("mask", "masked", "prefix", "partial"), "its meaning differs between tools"),
        "reasoning_details": "the thought is read from reasoning_content",
    }
)


def decode_messages(value: object, name: str = "messages") -> tuple[Message, ...]:
    """Decode a list of messages; a content with tool results becomes one message of role "tool" per result.

    The list may have items of OpenAI's Responses API, see `_merge_items`.

    Raises:
        InputError: a field is bad; the message has its index in the list.

    Example: `[{"role": "assistant", "content": "No idea.", "weight": 0}]` is one message that is not trained.
    """
    records = array(name, value)
    if any(_kind(record) not in (None, "message") for record in records):
        records = _merge_items(records, name)
    return tuple(message for i, record in enumerate(records) for message in _decode(record, f"{name}[{i}]"))


def is_trained(record: Mapping[str, Any], where: str, *, is_assistant: bool) -> bool:
    """Return whether a message is trained by its flags, `TRAINED_KEYS` and `CONTEXT_KEYS`; True without a flag.

    Raises:
        InputError: a flag is not 0 or 1, flags differ, a flag trains a message that the policy did not write, or an
            unknown key of the policy's message seems to be a flag.

    Example: {"content": "Wrong.", "skip_loss": True} is not trained.
    """
    for key, value in record.items() if is_assistant else ():
        speaks = any(word in key.lower() for word in ABOUT_TRAINING)
        if speaks and key not in (*TRAINED_KEYS, *CONTEXT_KEYS, *UNREADABLE) and not is_blank(value):
            raise InputError(
                f"{where}.{key} seems to set whether the message is trained, and Treering does not know this flag, got "
                f"{show(value)}; write it as train, 0 or 1, or remove it"
            )
    flags = {}
    for key in (*TRAINED_KEYS, *(CONTEXT_KEYS if is_assistant else ())):
        if (flag := record.get(key)) is None:
            continue
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise InputError(f"{where}.{key} says whether the message is trained, 0 or 1, got {show(flag)}; round it")
        flags[key] = bool(flag) != (key in CONTEXT_KEYS)
        if flags[key] and not is_assistant:
            raise InputError(f"{where}.{key} trains a message that no policy wrote; drop it, or give tokens and a mask")
    if len(set(flags.values())) > 1:
        raise InputError(f"{where} is trained by one of {', '.join(flags)} and not by another; keep one of them")
    return all(flags.values())


def _decode(record: object, where: str) -> Iterator[Message]:
    record = checked_object(where, record, fields="role and content")
    for key in filled(record, UNREADABLE):
        if record[key] is not False:
            raise InputError(f"{where}.{key} changes what is trained and cannot be read ({UNREADABLE[key]}); remove it")
    given = text_field(record, "role", f"{where}.role")
    if not given:
        raise InputError(f"{where} needs a role, got the keys {', '.join(record) or 'none'}; add one")
    role = ROLES.get(given.strip().lower(), given)
    content = decode_content(record.get("content"), f"{where}.content")
    yield from content.results
    calls = (*content.tool_calls, *_calls(record, where))
    text = content.text if content.text is not None else text_field(record, "refusal", f"{where}.refusal")
    if content.results and not (text or calls or content.images):
        return
    reasoning = _reasoning(record, content, where)
    if reasoning and role != "assistant":
        raise InputError(f"{where} has reasoning, and its role is {role!r}; only an assistant thinks, so remove it")
    yield Message(
        role=role,
        content=text,
        images=tuple(content.images),
        reasoning=reasoning,
        tool_calls=calls,
        name=text_field(record, "name", f"{where}.name"),
        tool_call_id=text_field(record, "tool_call_id", f"{where}.tool_call_id"),
        trained=is_trained(record, where, is_assistant=role == "assistant"),
    )


def _calls(record: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
    calls = array(f"{where}.tool_calls", record.get("tool_calls") or [])
    found = [decode_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if not is_blank(record.get("function_call")):
        found.append(decode_call(record["function_call"], f"{where}.function_call"))
    return tuple(found)


def _reasoning(record: Mapping[str, Any], content: Content, where: str) -> str | None:
    found = {key: text_field(record, key, f"{where}.{key}") for key in REASONING_KEYS if not is_blank(record.get(key))}
    if blocks := record.get("thinking_blocks"):
        found["thinking_blocks"] = decode_content(blocks, f"{where}.thinking_blocks").reasoning
    provider, name = object_in(record, "provider_specific_fields"), f"{where}.provider_specific_fields"
    found |= {key: text_field(provider, key, f"{name}.{key}") for key in REASONING_KEYS if provider.get(key)}
    thought = text_field(record, "thought", f"{where}.thought")
    # SWE-agent repeats parts of the content in `thought`.
    if thought and thought.strip() not in (content.text or ""):
        found["thought"] = thought
    if content.reasoning is not None:
        found["content"] = content.reasoning
    thoughts = {thought.strip() for thought in found.values() if thought and thought.strip()}
    if len(thoughts) > 1:
        raise InputError(f"{where} has different thoughts in {', '.join(found)}; keep one of them")
    return next((thought for thought in found.values() if thought and thought.strip()), None)
