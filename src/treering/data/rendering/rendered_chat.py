"""A chat under a chat template, each of its prefixes rendered at most once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from treering.data.rendering.template import ChatTemplate
from treering.data.trajectory import Message

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""


class RenderedChat:
    """The texts of a chat's prefixes.

    Example: under ChatML, with one user message "Hi", `closed(1)` ends in its end marker, and `opened(1)` is the prompt
    of the first answer.
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Renders nothing yet."""
        self.template = template
        self.messages = tuple(messages)
        self.tools = tools
        self._opened: dict[int, str] = {}
        self._closed: dict[int, str] = {}

    def opened(self, count: int) -> str:
        """The first `count` messages with a turn opened after them, as inference sees them.

        Raises:
            InputError: the template refuses the messages.
        """
        if count not in self._opened:
            self._opened[count] = self.template.prompt(self.messages[:count], self.tools)
        return self._opened[count]

    def closed(self, count: int) -> str:
        """The first `count` messages without an opened turn.

        Raises:
            InputError: the template refuses the messages.
        """
        if count not in self._closed:
            self._closed[count] = self.template.text(self.messages[:count], self.tools)
        return self._closed[count]

    def text(self, messages: Sequence[Message]) -> str:
        """Other messages under the same template and tools.

        Raises:
            InputError: the template refuses the messages.
        """
        return self.template.text(messages, self.tools)

    @cached_property
    def whole(self) -> str:
        """All messages, without an opened turn."""
        return self.closed(len(self.messages))

    @cached_property
    def num_seen(self) -> int:
        """Messages before the last turn of the policy; all if it has none."""
        trained = [i for i, message in enumerate(self.messages) if message.is_trained and i]
        return trained[-1] if trained else len(self.messages)

    @property
    def seen(self) -> str:
        """The last prompt that the policy saw, with the most messages."""
        return self.opened(self.num_seen)
