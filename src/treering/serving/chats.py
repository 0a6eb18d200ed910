"""OpenAI's `POST /v1/chat/completions`: chats as tokens, each turn after the tokens that were sampled before.

A session, named as in `treering.serving.sampler`, remembers its chats: a chat that begins with the messages of an
earlier answer goes on after the ids that this answer had, and nothing of it is rendered anew.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treering.data.trajectory import Message, ToolCall
from treering.engine.rollout import Rollout
from treering.errors import InputError, UnsupportedError
from treering.rl.environments.chat import ChatMemory, ChatTokens, as_messages, as_tools, split_calls, turn_message
from treering.serving.completions import ids_of, text_of, token_texts
from treering.serving.fields import Fields
from treering.serving.sampler import MAX_IDENTITIES
from treering.serving.sampling_params import Asked
from treering.serving.tokens import completion, logprobs_of
from treering.types import TokenIds

MAX_CHAT_TOKENS = 1 << 26
"""Token ids of chats that a server remembers, 256 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chat:
    """A chat to be continued."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    context: TokenIds
    """int32 [N]."""
    has_ids: bool
    """Whether token ids are sent back."""
    memory: ChatMemory
    """Of its session."""


class Chats:
    """The chats of a server's sessions; those that were quiet for longest are forgotten first.

    Example:
        >>> chats = Chats(ChatTokens(folder))                                                   # doctest: +SKIP
    """

    def __init__(self, tokens: ChatTokens) -> None:
        """`tokens`: the tokenizer with its chat template."""
        self.tokens = tokens
        self._memories: OrderedDict[str, ChatMemory] = OrderedDict()
        self._num_tokens = 0
        """At least as many ids as the memories hold."""

    def take(self, fields: Fields, session: str | None) -> Chat:
        """Takes a chat out of a body.

        Raises:
            InputError: messages or tools that cannot be read or rendered.
            UnsupportedError: a forced tool call.
        """
        messages = as_messages(_records(fields.need("messages", list), "messages"))
        tools = as_tools(_records(fields.take("tools", list, []), "tools"))
        choice = fields.take_any("tool_choice", (str, dict), "auto")
        if choice not in ("auto", "none"):
            raise UnsupportedError(f'tool_choice is "auto" or "none", got {choice!r}: the policy says what it says')
        fields.refuse_unless("parallel_tool_calls", (True,), "would forbid what the policy may say")
        tools = () if choice == "none" else tools
        memory = self._memory(session)
        return Chat(
            messages=messages,
            tools=tools,
            context=memory.context(messages, tools),
            has_ids=fields.take("return_token_ids", bool, False),
            memory=memory,
        )

    def with_stops(self, asked: Asked) -> Asked:
        """Ends a turn at the tokens that end it in the tokenizer, too."""
        stops = tuple(dict.fromkeys([*asked.sampling.stop_tokens, *self.tokens.text.end_tokens]))
        return replace(asked, sampling=replace(asked.sampling, stop_tokens=stops))

    def answer(
        self, request_id: str, model: str, chat: Chat, rollouts: Sequence[Rollout], asked: Asked
    ) -> dict[str, Any]:
        """The body of the answer; the session remembers each choice."""
        choices = [self._choice(i, request_id, chat, rollout, asked) for i, rollout in enumerate(rollouts)]
        self._num_tokens += sum(chat.context.size + rollout.num_tokens for rollout in rollouts)
        if self._num_tokens > MAX_CHAT_TOKENS:
            self._forget()
        return completion(request_id, "chat.completion", model, chat.context, rollouts, choices)

    def _choice(self, index: int, request_id: str, chat: Chat, rollout: Rollout, asked: Asked) -> dict[str, Any]:
        text, calls = self._read(chat, rollout, asked)
        message = turn_message(
            text, [replace(call, id=f"call_{request_id}_{index}_{i}") for i, call in enumerate(calls)]
        )
        noted = as_messages([message])
        chat.memory.note([*chat.messages, *noted], chat.tools, np.concatenate([chat.context, rollout.tokens]))
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls and rollout.finish_reason == "stop" else rollout.finish_reason,
            "logprobs": self._logprobs(rollout, asked) if asked.has_logprobs else None,
        }
        return choice | ids_of(chat.context, rollout) if chat.has_ids else choice

    def _read(self, chat: Chat, rollout: Rollout, asked: Asked) -> tuple[str, tuple[ToolCall, ...]]:
        text = text_of(rollout, asked, self.tokens.text.decode)
        return split_calls(text) if chat.tools else (text, ())

    def _logprobs(self, rollout: Rollout, asked: Asked) -> dict[str, Any]:
        pairs = zip(token_texts(rollout, self.tokens.text), logprobs_of(rollout, asked), strict=True)
        return {"content": [{"token": text, "logprob": value, "top_logprobs": []} for text, value in pairs]}

    def _memory(self, session: str | None) -> ChatMemory:
        if session is None:
            return ChatMemory(self.tokens)
        memory = self._memories.setdefault(session, ChatMemory(self.tokens))
        self._memories.move_to_end(session)
        if len(self._memories) > MAX_IDENTITIES:
            self._memories.popitem(last=False)
        return memory

    def _forget(self) -> None:
        """Forgets the sessions that were quiet for longest, until half of what fits is left."""
        sizes = {session: memory.num_tokens for session, memory in self._memories.items()}
        self._num_tokens = sum(sizes.values())
        for session, size in sizes.items():
            if self._num_tokens <= MAX_CHAT_TOKENS // 2:
                return
            del self._memories[session]
            self._num_tokens -= size


def _records(values: Sequence[object], name: str) -> list[Mapping[str, Any]]:
    wrong = next((value for value in values if not isinstance(value, dict)), None)
    if wrong is not None:
        raise InputError(f"{name} is a list of objects, got {wrong!r:.80} in it; correct it")
    return [value for value in values if isinstance(value, dict)]
