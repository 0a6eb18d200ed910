"""Reads the tool calls of a policy's turn, in the two spellings that most models write."""

import json
import re
from collections.abc import Sequence
from typing import Any

from treering.data.formats.tool_calls import decode_call
from treering.data.trajectory import ToolCall
from treering.errors import InputError

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of a turn without its tool calls, and the calls in order.

    A call is a JSON object with "name" and "arguments", between <tool_call> and </tool_call> or on a line of its own.
    What is no such object stays text.

    Example:
        >>> split_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        ('Let me see.', (ToolCall(name='add', arguments={'a': 1}, id=None),))
    """
    tagged = [(found.group(), _call(found.group(1))) for found in _TAGGED.finditer(text)]
    spans = tagged or [(line, _call(line)) for line in text.splitlines()]
    return _without(text, [span for span, call in spans if call]), tuple(call for _, call in spans if call)


def turn_message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A turn of the policy in OpenAI's spelling, whose arguments are JSON text.

    Example:
        >>> turn_message("", [ToolCall(name="add", arguments={"a": 1}, id="c1")])["tool_calls"][0]["function"]
        {'name': 'add', 'arguments': '{"a": 1}'}
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": each.id, "function": {"name": each.name, "arguments": each.arguments_text}}
            for each in calls
        ]
    return message


def _without(text: str, spans: Sequence[str]) -> str:
    if not spans:
        return text
    for span in spans:
        text = text.replace(span, "", 1)
    return text.strip()


def _call(text: str) -> ToolCall | None:
    try:
        record = json.loads(text)
        if not isinstance(record, dict) or not {"name", "arguments"} <= record.keys():
            return None
        return decode_call(record, "a tool call")
    except (ValueError, RecursionError, InputError):
        return None
