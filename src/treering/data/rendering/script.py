"""Scripts: the text of a trajectory with the character spans that the policy wrote, for raw text and plain chats."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treering.data.trajectory import RAW_FORMAT, Message, ToolCall, Trajectory

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


class Span(NamedTuple):
    """Characters `start` to `stop` (exclusive) of a script's text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Text with its trained spans, one per assistant turn."""

    text: str
    """The text to tokenize."""
    spans: tuple[Span, ...] = ()
    """Ascending, disjoint and not empty."""


def message_script(message: Message) -> Script:
    r"""A message in the plain chat form; an assistant's span runs from its text to the end marker, inclusive.

    The form is `<|im_start|>{role}\n{content}{tool calls}<|im_end|>\n`.

    Example: an assistant's "Hi" is the text `<|im_start|>assistant\nHi<|im_end|>\n` with the span (22, 34).
    """
    head = f"{TURN_START}{message.role}\n"
    body = f"{message.content or ''}{tool_calls_text(message.tool_calls)}{TURN_END}"
    spans = (Span(len(head), len(head) + len(body)),) if message.is_trained else ()
    return Script(text=f"{head}{body}\n", spans=spans)


def tool_calls_text(calls: Iterable[ToolCall]) -> str:
    """Tool calls as compact JSON objects, one per line, keys "name" then "arguments", characters unescaped.

    Arguments that are a JSON object are written as an object even if the source has them as text, so that both
    spellings of a call give the same tokens; anything else stays a JSON string.

    Example: `{"name":"search","arguments":{"query":"Zürich"}}`.
    """
    return "\n".join(_call_text(call) for call in calls)


def raw_script(messages: Sequence[Message]) -> Script:
    """The concatenated contents without markers; each assistant message with text is a span.

    Example: user "2+2=" and assistant "4" are the text "2+2=4" with the span (4, 5).
    """
    return join_scripts(_raw_message(message) for message in messages)


def join_scripts(scripts: Iterable[Script]) -> Script:
    """Joins scripts and shifts their spans.

    Example: "ab" without span and "cd" with the span (0, 2) join to "abcd" with the span (2, 4).
    """
    texts: list[str] = []
    spans: list[Span] = []
    offset = 0
    for script in scripts:
        texts.append(script.text)
        spans.extend(Span(span.start + offset, span.stop + offset) for span in script.spans)
        offset += len(script.text)
    return Script(text="".join(texts), spans=tuple(spans))


def plain_scripts(trajectory: Trajectory) -> list[Script]:
    """The plain form of a trajectory with messages: one script per message of a chat, one script for raw text."""
    assert trajectory.messages is not None, "only messages have a script"
    if trajectory.format == RAW_FORMAT:
        return [raw_script(trajectory.messages)]
    return [message_script(message) for message in trajectory.messages]


def _raw_message(message: Message) -> Script:
    text = message.content or ""
    return Script(text=text, spans=(Span(0, len(text)),) if message.is_trained and text else ())


def _call_text(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))
