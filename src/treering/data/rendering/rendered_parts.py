"""Compare a message with its rendered text: find dropped parts, and restore the spelling of calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from treering.data.rendering.thoughts import THOUGHT_TAG
from treering.data.trajectory import Message, ToolCall

_MIN_LENGTH = 16


def missing_part(message: Message, text: str) -> str | None:
    """Return the first part of a message, text or call, that is missing in `text`; None if nothing is missing.

    `message.reasoning` is not checked, because templates drop it from earlier turns on purpose. Reasoning tags inside
    the content may be respelled, so the pieces between the tags are searched.

    Example: for a message "Looking." that calls track, the text `{"name": "track", "arguments": {}}` lacks "Looking.".
    """
    start, at = len(text), 0
    for stretch in (part for text in message.stretches for part in THOUGHT_TAG.split(text)):
        for variant in dict.fromkeys(_text_variants(stretch.strip())):
            found = text.find(variant, at)
            if found >= 0:
                start, at = min(start, found), found + len(variant)
                break
        else:
            return f"the text {stretch.strip()!r:.60}"
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


def is_in_calls(message: Message) -> bool:
    """Return whether a message's text is also in its calls, or so short that a template may write it anywhere."""
    text = (message.content or "").strip()
    calls = [part for call in message.tool_calls for part in (call.name, str(call.given))]
    return bool(text) and (len(text) < _MIN_LENGTH or any(text in part for part in calls))


def restore_arguments(text: str, messages: Sequence[Message]) -> str:
    """Restore arguments as the model wrote them, if a template parsed and dumped them.

    Example: for arguments `{"x":1}`, the `{"x": 1}` of a template is replaced by `{"x":1}`.
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
            position, spelling = found
            pieces += [text[done:position], _written(call, spelling)]
            at = done = position + len(spelling)
        at = max(at, end)
    return "".join([*pieces, text[done:]])


def _end_of(part: str | None, text: str, at: int) -> int:
    """Return the end of a part's first occurrence at or after `at`; `at` if there is none."""
    wanted = (part or "").strip()
    found = text.find(wanted, at)
    return at if found < 0 else found + len(wanted)


def _written(call: ToolCall, spelling: str) -> str:
    """Return the replacement of a spelling: the model's text, or JSON for a Python literal."""
    if isinstance(call.given, str):
        return call.given
    return json.dumps(dict(call.given), ensure_ascii=False) if spelling == str(dict(call.given)) else spelling


@lru_cache(maxsize=4096)
def _text_spellings(arguments: str) -> Sequence[str]:
    # Each prefix of a chat needs the same calls.
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return _spellings_of(value) if isinstance(value, dict | str) else ()


def _spellings_of(value: Mapping[str, Any] | str) -> Sequence[str]:
    """Return the variants in which templates write the arguments of a call."""
    variants = [
        json.dumps(value, ensure_ascii=is_ascii, separators=separators)
        for separators in (None, (",", ":"))
        for is_ascii in (False, True)
    ]
    return tuple(dict.fromkeys([*variants, *([] if isinstance(value, str) else [str(value)])]))


def _find_call(call: ToolCall, text: str, at: int, stop: int) -> tuple[int, str] | None:
    """Return the position of a call's arguments after its name, and their spelling."""
    named = text.find(call.name, at, stop)
    found: tuple[int, str] | None = None
    given = call.given
    spellings = _text_spellings(given) if isinstance(given, str) else _spellings_of(dict(given))
    for spelling in spellings if named >= 0 else ():
        limit = found[0] + len(spelling) - 1 if found else stop
        position = text.find(spelling, named + len(call.name), min(limit, stop))
        found = (position, spelling) if position >= 0 else found
    return found


def _missing_argument(call: ToolCall, text: str) -> str | None:
    arguments = call.given
    if isinstance(arguments, str):
        if any(variant in text for variant in _text_variants(arguments)):
            return None
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"the arguments {arguments!r:.60}"
    for leaf in _leaves(arguments):
        variants = _text_variants(leaf) if isinstance(leaf, str) else [json.dumps(leaf), str(leaf)]
        if not any(variant in text for variant in variants):
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


def _text_variants(text: str) -> list[str]:
    """Return a text plain, and escaped as in JSON or Python, as some templates write tool results."""
    return [text.strip(), json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]]


def common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
