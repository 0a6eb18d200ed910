"""Chats as tokens: each turn goes on after the tokens that were sampled, and is rendered anew only where it has to be.

A chat whose earlier messages are those of an earlier call keeps the ids that this call read and sampled, and renders
the messages after it. Any other chat, such as one that summarises its history, is a new branch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date as Date
from pathlib import Path
from typing import Any

import numpy as np

from treering.data.formats.messages import decode_messages
from treering.data.formats.tool_calls import decode_call, decode_tools
from treering.data.rendering.renderer import Renderer, Template
from treering.data.trajectory import Message, ToolCall
from treering.errors import InputError
from treering.rl.tasks.text_tokens import TextTokens, end_of_turn
from treering.types import TokenIds

Messages = Sequence[Message | Mapping[str, Any]]
"""Chat messages, as records or in OpenAI's spelling."""

BYTES_FOLDER = Path(__file__).parent / "bytes"
"""A tokenizer of single bytes with the markers of the plain form: 258 ids, for models without a tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A chat up to a turn of the policy, that turn too, and its tokens."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    tokens: TokenIds


class ChatTokens:
    """A tokenizer with its chat template; shared by all episodes.

    Example: with Qwen3's tokenizer, `prompt([{"role": "user", "content": "Hi"}])` ends in the opening of an answer.
    """

    def __init__(self, tokenizer: Path, template: Template = "auto", date: Date | None = None) -> None:
        """Opens the folder; `template` and `date` are as for `Renderer`.

        Raises:
            ConfigError: the folder has no tokenizer, or no chat form.
        """
        self.text = TextTokens(tokenizer)
        self._renderer = Renderer(tokenizer=tokenizer, template=template, date=date)
        self._shows_tools = self._renderer.chat_template is not None

    @property
    def end_of_turn(self) -> str | None:
        """What the chat template writes after a turn; None for the plain form, whose marker the tokenizer knows."""
        template = self._renderer.chat_template
        return None if template is None else end_of_turn(template)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TokenIds:
        """The ids of a new chat, int32 [N].

        Raises:
            InputError: the template refuses or drops something.
        """
        return self._renderer.prompt(messages, self._shown(tools))

    def continuation(
        self, messages: Sequence[Message], num_seen: int, tools: Sequence[Mapping[str, Any]]
    ) -> TokenIds | None:
        """See `Renderer.continuation`."""
        return self._renderer.continuation(messages, num_seen, self._shown(tools))

    def _shown(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """The plain form has no place for tools: there a message of the user's says what they are."""
        return tuple(tools) if self._shows_tools else ()


class ChatMemory:
    """What one agent's chats were as tokens, in one episode.

    Example: after `note([question], [], ids)`, `context([question, answer, result], [])` begins with `ids`.
    """

    def __init__(self, chat: ChatTokens) -> None:
        """Knows nothing yet."""
        self._chat = chat
        self._known: list[_Known] = []

    @property
    def num_tokens(self) -> int:
        """Ids of all chats that it knows."""
        return sum(known.tokens.size for known in self._known)

    def context(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TokenIds:
        """The ids of a chat up to the policy's next turn, int32 [N].

        Raises:
            InputError: the template refuses or drops something.
        """
        known = self._longest(messages, tools)
        if known is not None:
            tail = self._chat.continuation(messages, len(known.messages), tools)
            if tail is not None:
                is_ended = known.tokens[-1] == tail[0]
                return np.concatenate([known.tokens, tail[1:] if is_ended else tail])
        return self._chat.prompt(messages, tools)

    def note(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tokens: TokenIds) -> None:
        """Notes a chat that ends with the policy's turn, and its ids, those that it sampled too."""
        self._known.append(_Known(tuple(messages), tuple(tools), tokens))

    def _longest(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Known | None:
        """The longest known beginning of a chat, the latest of equal ones."""
        found: _Known | None = None
        for known in self._known:
            size = len(known.messages)
            is_longer = found is None or size >= len(found.messages)
            if is_longer and tuple(messages[:size]) == known.messages and tuple(tools) == known.tools:
                found = known
        return found


def as_messages(messages: Messages) -> tuple[Message, ...]:
    """Validates messages; those of the assistant are context, whoever wrote them.

    Raises:
        InputError: no message, or one that cannot be read.

    Example: `as_messages([{"role": "user", "content": "Hi"}])` is `(Message(role="user", content="Hi"),)`.
    """
    records = [message for message in messages if not isinstance(message, Message)]
    decoded = iter(decode_messages([dict(record) for record in records]) if records else ())
    found = [message if isinstance(message, Message) else next(decoded) for message in messages]
    return tuple(replace(message, trained=message.role != "assistant") for message in found)


def as_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Validates tool schemas; raises InputError for what is none."""
    return decode_tools({"tools": [dict(tool) for tool in tools]}) if tools else ()


_CALL_END = "</tool_call>"
_TAGGED = re.compile(rf"<tool_call>(.*?){_CALL_END}", re.DOTALL)


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of a turn without its tool calls, and the calls in order.

    A call is a JSON object with "name" and "arguments", between <tool_call> and </tool_call> or on a line of its own.
    What is no such object stays text.

    Example:
        >>> split_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        ('Let me see.', (ToolCall(name='add', arguments={'a': 1}, id=None),))
    """
    # Nothing is searched after the last end: a turn may begin thousands of calls and end none.
    head, end, _ = text.rpartition(_CALL_END)
    tagged = [(found.group(), _call(found.group(1))) for found in _TAGGED.finditer(head + end)]
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
