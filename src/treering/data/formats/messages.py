"""Chat messages of JSON records: roles, typed contents, thoughts, tool calls, and which messages are trained."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from treering.data.formats.content_parts import Content, decode_content
from treering.data.formats.fields import array, filled, is_blank, show, text_field
from treering.data.formats.response_items import has_items, merge_items
from treering.data.formats.tool_calls import decode_call
from treering.data.trajectory import Message, ToolCall
from treering.errors import InputError

ROLES: Mapping[str, str] = MappingProxyType(
    {
        **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
        **dict.fromkeys(("gpt", "model", "ai", "bot", "chatgpt"), "assistant"),
        **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), "tool"),
        "human": "user",
    }
)
"""The roles of the formats that people have, in lower case, by Treering's; any other word stays as it is."""

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
"""Names of a message's flag: 1 or true trains it, 0 or false makes it context."""
CONTEXT_KEYS = ("no_loss", "ignore_loss", "mask_loss", "skip_loss", "ignore")
"""Names of a message's flag of the opposite sense: 1 or true makes it context."""
ABOUT_TRAINING = ("train", "loss", "mask", "learn", "ignore", "skip", "supervise")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
UNREADABLE = MappingProxyType(
    {
        **dict.fromkeys(("images", "image"), 'a picture is a part of the content, such as {"type": "image_url", ...}'),
        **dict.fromkeys(("videos", "video", "audio", "audios"), "Treering trains on text and pictures"),
        **dict.fromkeys(("training_detail", "train_detail"), "a message is trained whole or not at all"),
        **dict.fromkeys(("mask", "masked", "prefix", "partial"), "its meaning differs between tools"),
        "reasoning_details": "the thought is read from reasoning_content",
    }
)


def decode_messages(value: object, name: str = "messages") -> tuple[Message, ...]:
    """The messages of a list; a content with tool results becomes one message of role "tool" per result.

    Items of OpenAI's Responses API may stand between them: see `merge_items`.

    Raises:
        InputError: a bad field, with its place in the list.

    Example: `[{"role": "assistant", "content": "No idea.", "weight": 0}]` is one message that is not trained.
    """
    records = array(name, value)
    if has_items(records):
        records = merge_items(records, name)
    return tuple(message for i, record in enumerate(records) for message in _decode(record, f"{name}[{i}]"))


def is_trained(record: Mapping[str, Any], where: str, *, is_assistant: bool) -> bool:
    """Whether the flags of a message train it, `TRAINED_KEYS` and `CONTEXT_KEYS`; True without a flag.

    Raises:
        InputError: a value that is not 0 or 1, flags that differ, a flag that trains what no policy wrote, or a key
            of the policy's message that speaks of training and is no known flag.

    Example: {"content": "Wrong.", "skip_loss": True} is not trained.
    """
    if is_assistant:
        _check_flags_are_known(record, where)
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


def _check_flags_are_known(record: Mapping[str, Any], where: str) -> None:
    for key, value in record.items():
        speaks = any(word in key.lower() for word in ABOUT_TRAINING)
        if speaks and key not in (*TRAINED_KEYS, *CONTEXT_KEYS, *UNREADABLE) and not is_blank(value):
            raise InputError(
                f"{where}.{key} seems to say whether the message is trained, and is no flag that Treering knows, got "
                f"{show(value)}; write it as train, 0 or 1, or remove it"
            )


def _decode(record: object, where: str) -> Iterator[Message]:
    if not isinstance(record, dict):
        raise InputError(f"{where} must be an object with role and content, got {show(record)}; repair it")
    for key in filled(record, UNREADABLE):
        if record[key] is not False:
            raise InputError(f"{where}.{key} changes what is trained and cannot be read ({UNREADABLE[key]}); remove it")
    role = _role(record, where)
    content = decode_content(record.get("content"), f"{where}.content")
    for result in content.results:
        yield Message(role="tool", content=result.content, tool_call_id=result.tool_call_id)
    calls = (*content.tool_calls, *_calls(record, where))
    text = content.text if content.text is not None else text_field(record, "refusal", f"{where}.refusal")
    if content.results and not (text or calls or content.pictures):
        return
    reasoning = _reasoning(record, content, where)
    if reasoning and role != "assistant":
        raise InputError(f"{where} has reasoning, and its role is {role!r}; only an assistant thinks, so remove it")
    yield Message(
        role=role,
        content=text,
        pictures=tuple(content.pictures),
        reasoning=reasoning,
        tool_calls=calls,
        name=text_field(record, "name", f"{where}.name"),
        tool_call_id=text_field(record, "tool_call_id", f"{where}.tool_call_id"),
        trained=is_trained(record, where, is_assistant=role == "assistant"),
    )


def _role(record: Mapping[str, Any], where: str) -> str:
    role = text_field(record, "role", f"{where}.role")
    if not role:
        raise InputError(f"{where} needs a role, got the keys {', '.join(record) or 'none'}; add one")
    return ROLES.get(role.strip().lower(), role)


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
    provider = record.get("provider_specific_fields")
    if isinstance(provider, dict):
        name = f"{where}.provider_specific_fields"
        found |= {key: text_field(provider, key, f"{name}.{key}") for key in REASONING_KEYS if provider.get(key)}
    thought = text_field(record, "thought", f"{where}.thought")
    # SWE-agent repeats in `thought` what its content has.
    if thought and thought.strip() not in (content.text or ""):
        found["thought"] = thought
    if content.reasoning is not None:
        found["content"] = content.reasoning
    thoughts = {thought.strip() for thought in found.values() if thought and thought.strip()}
    if len(thoughts) > 1:
        raise InputError(f"{where} has different thoughts in {', '.join(found)}; keep one of them")
    return next((thought for thought in found.values() if thought and thought.strip()), None)
