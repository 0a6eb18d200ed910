"""Compares a message with the text that a chat template made of it: what is missing, and how calls are spelled."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treering.data.trajectory import Message, ToolCall

THOUGHT_TAG = re.compile(r"</?[\w:]*think[\w:]*>|\[/?THINK\]")
"""Opens or closes a thought, in the spellings of the model families."""


def missing_part(message: Message, text: str) -> str | None:
    """What of a message does not stand in `text`, in the order text, then calls; None if all does.

    The thought of `message.reasoning` is not looked for: templates drop it from earlier turns on purpose. Thoughts
    inside the content may be respelled: the stretches between their tags are looked for.

    Example: of a message "Looking." that calls track, the text `{"name": "track", "arguments": {}}` lacks "Looking.".
    """
    at = 0
    for stretch in THOUGHT_TAG.split(message.content or ""):
        found = text.find(stretch.strip(), at)
        if found < 0:
            return f"the text {stretch.strip()!r:.60}"
        at = found + len(stretch.strip())
    for call in message.tool_calls:
        found = text.find(call.name, at)
        if found < 0:
            return f"the call of {call.name!r}"
        at = found + len(call.name)
        if lost := _missing_argument(call, text[at:]):
            return f"{lost} of the call of {call.name!r}"
    return None


def restore_arguments(text: str, messages: Sequence[Message]) -> str:
    """Puts arguments back as the model wrote them where a template parsed and dumped them again.

    Example: for arguments `{"x":1}`, a template that writes `{"x": 1}` gets `{"x":1}` in that place.
    """
    at = 0
    for message in messages:
        for part in (message.reasoning, message.content):
            at = _end_of(part, text, at)
        for call in message.tool_calls:
            at = _end_of(call.name, text, at)
            found = _find_first(text, at, _spellings(call))
            if found is None:
                continue
            start, spelling = found
            written = _written(call, spelling)
            text = f"{text[:start]}{written}{text[start + len(spelling) :]}"
            at = start + len(written)
    return text


def _end_of(part: str | None, text: str, at: int) -> int:
    """Where a part ends at or after `at`; `at` itself if it is not there."""
    wanted = (part or "").strip()
    found = text.find(wanted, at)
    return at if found < 0 else found + len(wanted)


def _written(call: ToolCall, spelling: str) -> str:
    """What stands in the place of a spelling: the model's text, else JSON instead of Python's own form."""
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps(dict(call.arguments), ensure_ascii=False) if spelling == str(dict(call.arguments)) else spelling


def _spellings(call: ToolCall) -> list[str]:
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return []
    if not isinstance(arguments, Mapping):
        return []
    value = dict(arguments)
    compact = (",", ":")
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value),
        json.dumps(value, ensure_ascii=False, separators=compact),
        json.dumps(value, separators=compact),
        str(value),
    ]


def _find_first(text: str, at: int, spellings: Iterable[str]) -> tuple[int, str] | None:
    found = [(text.find(spelling, at), spelling) for spelling in spellings]
    return min((one for one in found if one[0] >= 0), default=None)


def _missing_argument(call: ToolCall, text: str) -> str | None:
    arguments = call.arguments
    if isinstance(arguments, str):
        if any(form in text for form in _text_forms(arguments)):
            return None
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"the arguments {arguments!r:.60}"
    for leaf in _leaves(arguments):
        if not any(form in text for form in _forms(leaf)):
            return f"the argument {leaf!r:.60}"
    return None


def _leaves(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _forms(leaf: object) -> list[str]:
    return _text_forms(leaf) if isinstance(leaf, str) else [json.dumps(leaf), str(leaf)]


def _text_forms(text: str) -> list[str]:
    return [text.strip(), json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]]
