"""Compares a message with the text that a chat template made of it: what is missing, and how calls are spelled."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from treering.data.rendering.thoughts import THOUGHT_TAG
from treering.data.trajectory import Message, ToolCall

_MIN_LENGTH = 16


def missing_part(message: Message, text: str) -> str | None:
    """What of a message does not stand in `text`, in the order text, then calls; None if all does.

    The thought of `message.reasoning` is not looked for: templates drop it from earlier turns on purpose. Thoughts
    inside the content may be respelled: the stretches between their tags are looked for.

    Example: of a message "Looking." that calls track, the text `{"name": "track", "arguments": {}}` lacks "Looking.".
    """
    start, at = len(text), 0
    for stretch in (part for text in message.stretches for part in THOUGHT_TAG.split(text)):
        found = _find_text(stretch.strip(), text, at)
        if found is None:
            return f"the text {stretch.strip()!r:.60}"
        start, at = min(start, found.start), found.stop
    lost = _missing_call(message, text[at:])
    # Some templates write the calls before the text.
    return lost and _missing_call(message, text[:start]) and lost


def _missing_call(message: Message, text: str) -> str | None:
    at = 0
    for call in message.tool_calls:
        found = text.find(call.name, at)
        if found < 0:
            return f"the call of {call.name!r}"
        at = found + len(call.name)
        if lost := _missing_argument(call, text[at:]):
            return f"{lost} of the call of {call.name!r}"
    return None


def says_by_itself(message: Message) -> bool:
    """Whether a message's text stands in its own calls too, or is so short that a template may write it anywhere."""
    text = (message.content or "").strip()
    calls = [part for call in message.tool_calls for part in (call.name, str(call.arguments))]
    return bool(text) and (len(text) < _MIN_LENGTH or any(text in part for part in calls))


def restore_arguments(text: str, messages: Sequence[Message]) -> str:
    """Puts arguments back as the model wrote them where a template parsed and dumped them again.

    Example: for arguments `{"x":1}`, a template that writes `{"x": 1}` gets `{"x":1}` in that place.
    """
    if not any(message.tool_calls for message in messages):
        return text
    at = done = 0
    pieces: list[str] = []
    for message in messages:
        at = _end_of(message.reasoning, text, at)
        end = _end_of(message.content, text, at)
        start = end - len((message.content or "").strip())
        for call in message.tool_calls:
            # Some templates write the calls before the text.
            found = _find_call(call, text, at, start) or _find_call(call, text, max(at, end), len(text))
            if found is None:
                continue
            place, spelling = found
            pieces += [text[done:place], _written(call, spelling)]
            at = done = place + len(spelling)
        at = max(at, end)
    return "".join([*pieces, text[done:]])


def _find_text(stretch: str, text: str, at: int) -> slice | None:
    """Where a text stands, as it is or escaped as in JSON, where some templates put the answers of tools."""
    for form in dict.fromkeys(_text_forms(stretch)):
        found = text.find(form, at)
        if found >= 0:
            return slice(found, found + len(form))
    return None


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


def _spellings(call: ToolCall) -> Sequence[str]:
    """How templates spell the arguments of a call."""
    if not isinstance(call.arguments, str):
        return _spellings_of(dict(call.arguments))
    return _text_spellings(call.arguments)


@lru_cache(maxsize=4096)
def _text_spellings(arguments: str) -> Sequence[str]:
    # Each prefix of a chat asks for the same calls again.
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return _spellings_of(value) if isinstance(value, dict | str) else ()


def _spellings_of(value: Mapping[str, Any] | str) -> Sequence[str]:
    compact = (",", ":")
    plain = [] if isinstance(value, str) else [str(value)]
    forms = [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value),
        json.dumps(value, ensure_ascii=False, separators=compact),
        json.dumps(value, separators=compact),
        *plain,
    ]
    return tuple(dict.fromkeys(forms))


def _find_call(call: ToolCall, text: str, at: int, stop: int) -> tuple[int, str] | None:
    """Where the arguments of a call stand first after its name, and their spelling."""
    named = text.find(call.name, at, stop)
    found: tuple[int, str] | None = None
    for spelling in _spellings(call) if named >= 0 else ():
        limit = found[0] + len(spelling) - 1 if found else stop
        place = text.find(spelling, named + len(call.name), min(limit, stop))
        found = (place, spelling) if place >= 0 else found
    return found


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


def common_length(one: str, other: str) -> int:
    """Length of the longest common beginning of two texts.

    Example: of "abc" and "abd" it is 2.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
