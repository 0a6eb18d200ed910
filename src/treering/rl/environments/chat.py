"""Chats as tokens: each turn continues the sampled tokens, and a chat is rendered again only where necessary.

A chat that begins with the messages of an earlier call keeps the ids that were read and sampled there; only the
messages after them are rendered. Any other chat, such as one that summarises its history, is a new branch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import date as Date
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from treering.data.formats.chat_messages import decode_messages, decode_tools
from treering.data.rendering.call_formats import CallFormat, PlainFormat, find_call_format
from treering.data.rendering.renderer import Renderer, Template
from treering.data.rendering.template import CONFIG_FILE, read_settings
from treering.data.rendering.thoughts import answer_start, has_tags, without_headers
from treering.data.trajectory import Message, ToolCall
from treering.engine.stop_strings import Decode
from treering.errors import ConfigError
from treering.rl.tasks.text_tokens import TextTokens
from treering.types import TokenIds

Messages = Sequence[Message | Mapping[str, Any]]
"""Chat messages, as records or in OpenAI's format."""

BYTES_FOLDER = Path(__file__).parent / "bytes"
"""A tokenizer of single bytes with the plain form's markers, 258 ids, for models without a tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A chat up to and including a turn of the policy, and its tokens."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    tokens: TokenIds


class ChatTokens:
    """A tokenizer with its chat template; all episodes share it."""

    def __init__(self, tokenizer: Path, template: Template = "auto", date: Date | None = None) -> None:
        """Open the folder; `template` and `date` are as for `Renderer`."""
        self.text = TextTokens(tokenizer)
        self._folder = tokenizer
        self.renderer = Renderer(tokenizer=tokenizer, template=template, date=date)
        """Renderer of chats."""
        self._shows_tools = self.renderer.chat_template is not None

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTokens":
        """Return the same chats with values for the chat template's own variables.

        Raises:
            ConfigError: the chat template does not read one of them, or chats are in the plain form.

        Example: `with_variables({"enable_thinking": False})` for Qwen3's tokenizer.
        """
        if not self._shows_tools:
            raise ConfigError(f"the plain form of chats has no variables, got {', '.join(variables)}; remove them")
        other = copy(self)
        other.renderer = Renderer(
            tokenizer=self._folder, template=self.renderer.template, date=self.renderer.date, variables=variables
        )
        # Check the names before anything is rendered.
        other.renderer.chat_template  # noqa: B018
        return other

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TokenIds:
        """Return the ids of a new chat, int32 [N]."""
        return self.renderer.prompt(messages, self._shown(tools))

    def continuation(
        self, messages: Sequence[Message], num_seen: int, tools: Sequence[Mapping[str, Any]]
    ) -> TokenIds | None:
        """Return the ids after the first `num_seen` messages; see `Renderer.continuation`."""
        return self.renderer.continuation(messages, num_seen, self._shown(tools))

    def read(
        self, context: TokenIds, decode: Callable[[Decode], str], tools: Sequence[Mapping[str, Any]]
    ) -> "ReadTurn":
        """Read the turn that the policy wrote after a context.

        Args:
            context: int32 [N]; it may open a thought.
            decode: applies a decoder of ids to the ids of the turn.
            tools: tools of the chat; without any, no calls are read.

        Raises:
            UnsupportedError: there are tools, but the template's calls cannot be read.
        """
        written, text = decode(self.text.decode_all), decode(self.text.decode)
        call_format = self.call_format if tools else None
        start = answer_start(written, self.text.end_of(context))
        rest = "" if start is None else written[start:]
        rest, calls = (rest, ()) if call_format is None else call_format.split(rest, tools)
        answer = self.text.without_special(rest)
        answer = answer.strip() if calls or start else answer
        thought = self.text.without_special(written[:start])
        if has_tags(written[:start]) and not has_tags(thought):
            # The tags are special tokens, which message text never contains.
            return ReadTurn(text=answer, content=answer, calls=calls, thought=thought.strip())
        if not calls and without_headers(written) == written:
            return ReadTurn(text=text if start == 0 else answer, content=text, calls=())
        return ReadTurn(text=answer, content=(thought + answer).strip(), calls=calls)

    @cached_property
    def call_format(self) -> CallFormat:
        """Format of tool calls in the chat template, or the plain form's."""
        template = self.renderer.chat_template
        if template is None:
            return PlainFormat()
        return find_call_format(template, read_settings(self._folder / CONFIG_FILE))

    def _shown(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return the tools to render: none in the plain form, where a user message describes them."""
        return tuple(tools) if self._shows_tools else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTurn:
    """Turn of the policy as text, without special tokens."""

    text: str
    """Text after the thought, without the calls; "" if the thought does not end."""
    content: str
    """Text of its message, without the calls, including a thought whose tags are not special tokens."""
    calls: tuple[ToolCall, ...]
    """Calls after the thought, in order."""
    thought: str | None = None
    """Thought whose tags are special tokens, else None."""

    def with_ids(self, *parts: object) -> "ReadTurn":
        """Give each call without an id one that is derived from `parts`."""
        calls = [replace(each, id=each.id or short_id(*parts, i)) for i, each in enumerate(self.calls)]
        return replace(self, calls=tuple(calls))

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message in OpenAI's format."""
        return turn_message(self.content, self.calls, self.thought)


class ChatMemory:
    """Tokens of one agent's chats in one episode."""

    def __init__(self, chat: ChatTokens) -> None:
        """Start without any chat."""
        self._chat = chat
        self._known: list[_Known] = []

    @property
    def num_tokens(self) -> int:
        """Number of ids in all known chats."""
        return sum(known.tokens.size for known in self._known)

    def context(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TokenIds:
        """Return the ids of a chat up to the policy's next turn, int32 [N].

        Raises:
            InputError: the template refuses or drops a part of the chat.
            UnsupportedError: there are tools, but the template's calls cannot be read.
        """
        known = self._longest(messages, tools)
        if known is not None:
            tail = self._chat.continuation(messages, len(known.messages), tools)
            if tail is not None:
                is_ended = known.tokens[-1] == tail[0]
                return np.concatenate([known.tokens, tail[1:] if is_ended else tail])
        context = self._chat.prompt(messages, tools)
        if tools:
            # Refuse an unreadable format of calls before anything is sampled.
            self._chat.call_format  # noqa: B018
        return context

    def note(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tokens: TokenIds) -> None:
        """Remember a chat that ends with the policy's turn, and its ids, including the sampled ones."""
        self._known.append(_Known(tuple(messages), tuple(tools), tokens))

    def _longest(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Known | None:
        """Return the longest known chat with which this one begins; among equals, the latest."""
        found: _Known | None = None
        for known in self._known:
            size = len(known.messages)
            is_longer = size <= len(messages) and (found is None or size >= len(found.messages))
            if is_longer and tuple(tools) == known.tools and _same(known.messages, messages[:size]):
                found = known
        return found


def as_messages(messages: Messages) -> tuple[Message, ...]:
    """Validate messages; assistant messages become untrained context, whoever wrote them.

    Raises:
        InputError: there is no message, or one cannot be read.
    """
    records = [message for message in messages if not isinstance(message, Message)]
    decoded = iter(decode_messages([dict(record) for record in records]) if records else ())
    found = [message if isinstance(message, Message) else next(decoded) for message in messages]
    return tuple(replace(message, trained=message.role != "assistant") for message in found)


def as_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Validate tool schemas; raise InputError for an invalid one."""
    return decode_tools({"tools": [dict(tool) for tool in tools]}) if tools else ()


def turn_message(text: str, calls: Sequence[ToolCall], thought: str | None = None) -> dict[str, Any]:
    """Return a turn of the policy as a message in OpenAI's format, with arguments as JSON text.

    Example:
        >>> turn_message("", [ToolCall(name="add", arguments={"a": 1}, id="c1")])["tool_calls"][0]["function"]
        {'name': 'add', 'arguments': '{"a": 1}'}
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": each.id, "function": {"name": each.name, "arguments": each.arguments_text}}
            for each in calls
        ]
    return message


def short_id(*parts: object) -> str:
    """Return an id of nine letters and digits, as Mistral's templates require for calls."""
    return blake2b(repr(parts).encode(), digest_size=5).hexdigest()[:9]


def _same(known: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Return whether the messages that a client sends back are the known ones.

    A client may write missing text as null, serialise arguments again, and drop separate thoughts.
    """
    pairs = zip(known, sent, strict=True)
    return all(_key(one) == _key(replace(other, reasoning=other.reasoning or one.reasoning)) for one, other in pairs)


def _key(message: Message) -> Message:
    calls = tuple(replace(call, arguments=_canonical(call)) for call in message.tool_calls)
    return replace(message, content=message.content or "", tool_calls=calls)


def _canonical(call: ToolCall) -> str:
    """Return the arguments as JSON in one spelling; text that is not JSON stays as it is."""

    def number(text: str) -> float | int:
        return int(value) if (value := float(text)).is_integer() else value

    try:
        return json.dumps(json.loads(call.arguments_text, parse_float=number), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments_text
