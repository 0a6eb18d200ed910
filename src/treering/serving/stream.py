"""Answers as server-sent events, in OpenAI's format: text while it is sampled, then what the whole answer adds.

The texts of all events of a choice are the text of the whole answer. What may still be read differently is held back: a
character whose bytes are incomplete, a text that may begin a stop string, and any turn of a chat that may call tools or
think (`Chats.settled`).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from treering.engine.protocol import Rollout
from treering.errors import StateError
from treering.serving.bodies import Fields

WatchAnswer = Callable[[int, Rollout], None]
"""Called in the engine's thread with the index of an answer and its rollout so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """Call of a route that answers with text."""

    sample: Callable[[WatchAnswer | None], Awaitable[list[Rollout]]]
    whole: Callable[[Sequence[Rollout]], dict[str, Any]]
    """Body of the whole answer."""
    settled: Callable[[Rollout], str]
    """Text of a rollout so far that no later token changes."""
    is_streamed: bool
    has_usage: bool
    """Whether the last event of a stream counts tokens."""


def take_stream(fields: Fields) -> tuple[bool, bool]:
    """Take whether to stream, and whether the last event counts tokens.

    Raises:
        InputError: a field of another type.
        UnsupportedError: an unknown option.
    """
    is_streamed = fields.take("stream", bool, False)
    options = Fields(fields.take("stream_options", dict, {}), "stream_options")
    has_usage = options.take("include_usage", bool, False)
    options.end()
    return is_streamed, has_usage


def settled_text(text: str, stop_strings: Sequence[str]) -> str:
    r"""Return the beginning of a text that stays, whatever is sampled after it.

    Example:
        >>> settled_text("4 apples EN", ("END",)), settled_text("caf\N{REPLACEMENT CHARACTER}", ())
        ('4 apples ', 'caf')
    """
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    open_sizes = (size for stop in stop_strings for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return text[: len(text) - max(open_sizes, default=0)]


async def events(call: TextCall) -> AsyncGenerator[bytes, None]:
    """Sample, and yield the events of the answer; closing the iterator aborts the call.

    Raises:
        StateError: the whole answer does not begin with the text that was sent.
        Exception: what the call raises.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Rollout] | None]()

    def watch(index: int, rollout: Rollout) -> None:
        # The server may have closed its loop since.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, (index, rollout))

    sampling = asyncio.ensure_future(call.sample(watch))
    sampling.add_done_callback(lambda _: queue.put_nowait(None))
    head: dict[str, Any] = {}
    sent: dict[int, str] = {}
    try:
        while (found := await queue.get()) is not None:
            index, rollout = found
            head = head or call.whole([])
            text, before = call.settled(rollout), sent.get(index)
            if text.startswith(before or "") and len(text) > len(before or ""):
                yield _event(head, [_part(head["object"], index, text[len(before or "") :], is_first=before is None)])
                sent[index] = text
        rollouts = await sampling
    finally:
        sampling.cancel()
    whole = call.whole(rollouts)
    head = head or whole
    for choice in whole["choices"]:
        yield _event(head, [_rest(head["object"], choice, sent.get(choice["index"]))])
    if call.has_usage:
        yield _event(head, [], usage=whole["usage"])
    yield b"data: [DONE]\n\n"


def error_event(body: Mapping[str, Any]) -> bytes:
    """Return the event of an error after the first event."""
    return f"data: {json.dumps(body)}\n\n".encode()


def _event(head: Mapping[str, Any], choices: list[dict[str, Any]], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if head["object"] == "chat.completion" else head["object"]
    body = {"id": head["id"], "object": kind, "created": head["created"], "model": head["model"], "choices": choices}
    return f"data: {json.dumps(body | more)}\n\n".encode()


def _part(kind: str, index: int, text: str, *, is_first: bool) -> dict[str, Any]:
    """Return a choice with a piece of its text."""
    rest = {"index": index, "finish_reason": None, "logprobs": None}
    if kind == "text_completion":
        return rest | {"text": text}
    return rest | {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}}


def _rest(kind: str, choice: Mapping[str, Any], sent: str | None) -> dict[str, Any]:
    """Return a choice of the whole answer without the text that was sent."""
    if kind == "text_completion":
        return {**choice, "text": _after(sent, choice["text"])}
    message = dict(choice["message"])
    if sent is not None:
        del message["role"]
    message["content"] = _after(sent, message["content"])
    if "tool_calls" in message:
        message["tool_calls"] = [each | {"index": i} for i, each in enumerate(message["tool_calls"])]
    return {name: value for name, value in choice.items() if name != "message"} | {"delta": message}


def _after(sent: str | None, text: str | None) -> str | None:
    if not sent:
        return text
    if text is None or not text.startswith(sent):
        raise StateError(f"the answer no longer begins with the {len(sent)} characters sent; ask again without stream")
    return text[len(sent) :]
