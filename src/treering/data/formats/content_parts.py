"""Contents that are lists of typed parts, as OpenAI's, Anthropic's and other APIs write them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treering.data.formats.fields import is_blank, show, text_field
from treering.data.formats.pictures import PICTURE_PART
from treering.data.formats.tool_calls import decode_call
from treering.data.pictures.source import MessagePicture, PictureSource
from treering.data.trajectory import ToolCall
from treering.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer of a tool inside a message of parts."""

    content: str
    """Its text."""
    tool_call_id: str | None
    """The call that it answers."""


@dataclass(slots=True, kw_only=True)
class Content:
    """What the parts of one content say, in the order in which a message is rendered."""

    text: str | None = None
    pictures: list[MessagePicture] = field(default_factory=list)
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)


def decode_content(value: object, where: str) -> Content:
    """Text, thought, tool calls and tool results of a content: text, one part, or a list of parts; null is none.

    Texts of one kind are joined as they stand.

    Raises:
        InputError: a part of a type that is no text, or parts in an order that a message has no form for: reasoning,
            text, tool calls.

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
            f"{where} is a part of type {show(kind)}, and Treering trains on text, and on pictures in the formats "
            f"treering, chat and trl: {', '.join(_KINDS)}; remove the part or the trajectory"
        )
    add(content, part, where)


def _add_text(content: Content, part: Mapping[str, Any], where: str) -> None:
    text = _required(part, ("refusal",) if part.get("type") == "refusal" else ("text",), where)
    if text and content.tool_calls:
        raise InputError(f"{where} is text after a tool call, and a message has its text first; split the message")
    content.text = (content.text or "") + text


def _add_picture(content: Content, part: Mapping[str, Any], where: str) -> None:
    source = part.get(PICTURE_PART)
    if not isinstance(source, PictureSource):
        raise InputError(f'{where} is a picture as {{"type": "image_url", ...}}, got {show(part)}; write it so')
    if content.tool_calls:
        raise InputError(f"{where} is a picture after a tool call, and a message has its calls last; split the message")
    content.text = content.text or ""
    content.pictures.append(MessagePicture(at=len(content.text), source=source))


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
    if content.text or content.pictures:
        raise InputError(
            f"{where} is a tool's result after text, and a message has its results first; split the message"
        )
    if inner.reasoning or inner.tool_calls or inner.results or inner.pictures:
        raise InputError(f"{where} is a tool's result and holds text only, got {show(part)}; remove the other parts")
    content.results.append(
        ToolResult(content=inner.text or "", tool_call_id=text_field(part, "tool_use_id", f"{where}.tool_use_id"))
    )


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
    PICTURE_PART: _add_picture,
    "tool_use": _add_call,
    "tool_result": _add_result,
}
