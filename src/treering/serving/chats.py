"""Chats over HTTP: messages in, the next turn out; a session's chats continue the ids that were sampled."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treering.data.rendering.thoughts import answer_start, without_headers
from treering.data.trajectory import Message
from treering.engine.protocol import Rollout
from treering.errors import InputError, UnsupportedError
from treering.rl.environments.chat import ChatMemory, ChatTokens, as_messages, as_tools
from treering.serving.bodies import Asked, Fields, completion, ids_of, logprobs_of, text_of, token_text, top_of
from treering.serving.stream import settled_text
from treering.types import TokenIds

MAX_SESSIONS = 65536
"""Sessions whose chats are remembered; those idle longest are forgotten first."""
MAX_VARIANTS = 16
"""Sets of chat template variables whose renderers a server keeps."""
MAX_CHAT_TOKENS = 1 << 26
"""Token ids of chats that a server remembers: 256 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chat:
    """Chat to be continued."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    context: TokenIds
    """int32 [N]."""
    has_ids: bool
    """Whether to send token ids back."""
    memory: ChatMemory
    """Memory of its session."""


class Chats:
    """Chats of a server's sessions; those idle longest are forgotten first.

    Example:
        >>> chats = Chats(ChatTokens(folder))                                                   # doctest: +SKIP
    """

    def __init__(self, tokens: ChatTokens) -> None:
        """Render chats with `tokens`, a tokenizer and its chat template."""
        self.tokens = tokens
        self._variants: OrderedDict[str, ChatTokens] = OrderedDict({"{}": tokens})
        """Tokens by the values of the chat template's own variables, as JSON."""
        self._memories: OrderedDict[tuple[str, str], ChatMemory] = OrderedDict()
        self._num_tokens = 0
        """Upper bound of the ids that the memories hold."""

    def take(self, fields: Fields, session: str | None) -> Chat:
        """Read a chat from the fields of a body.

        Raises:
            InputError: messages or tools that cannot be read or rendered.
            UnsupportedError: a forced tool call, or tools under a template whose calls cannot be read.
            ConfigError: a variable that the chat template does not read.
        """
        messages = as_messages(_records(fields.need("messages", list), "messages"))
        tools = as_tools(_records(fields.take("tools", list, []), "tools"))
        choice = fields.take_any("tool_choice", (str, dict), "auto")
        if choice not in ("auto", "none"):
            raise UnsupportedError(f'tool_choice must be "auto" or "none", got {choice!r}: calls cannot be forced')
        fields.refuse_unless("parallel_tool_calls", (True,), "would restrict what the policy may sample")
        tools = () if choice == "none" else tools
        variables: dict[str, Any] = fields.take("chat_template_kwargs", dict, {})
        if effort := fields.take("reasoning_effort", str, ""):
            variables = variables | {"reasoning_effort": effort}
        fields.refuse_unless("add_special_tokens", (False,), "adds tokens that the chat template has not written")
        memory = self._memory(session, variables)
        return Chat(
            messages=messages,
            tools=tools,
            context=memory.context(messages, tools),
            has_ids=fields.take("return_token_ids", bool, False),
            memory=memory,
        )

    def with_stops(self, asked: Asked) -> Asked:
        """Add the template's stop strings, for turns that no token ends."""
        strings = tuple(dict.fromkeys([*asked.sampling.stop_strings, *self.tokens.renderer.stop_strings]))
        return replace(asked, sampling=asked.sampling.changed(stop_strings=strings))

    def answer(
        self, request_id: str, model: str, chat: Chat, rollouts: Sequence[Rollout], asked: Asked
    ) -> dict[str, Any]:
        """Return the body of the answer; the session remembers each choice."""
        choices = [self._choice(i, request_id, chat, rollout, asked) for i, rollout in enumerate(rollouts)]
        self._num_tokens += sum(chat.context.size + rollout.num_tokens for rollout in rollouts)
        if self._num_tokens > MAX_CHAT_TOKENS:
            self._forget()
        return completion(request_id, "chat.completion", model, chat.context, rollouts, choices)

    def _choice(self, index: int, request_id: str, chat: Chat, rollout: Rollout, asked: Asked) -> dict[str, Any]:
        turn = self.tokens.read(chat.context, lambda decode: text_of(rollout, asked, decode), chat.tools)
        message = turn.with_ids(request_id, index).message
        message["content"] = None if turn.calls and not message["content"] else message["content"]
        noted = as_messages([message])
        chat.memory.note([*chat.messages, *noted], chat.tools, np.concatenate([chat.context, rollout.tokens]))
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if turn.calls and rollout.finish_reason == "stop" else rollout.finish_reason,
            "logprobs": self._logprobs(rollout, asked) if asked.has_logprobs else None,
        }
        return choice | ids_of(chat.context, rollout) if chat.has_ids else choice

    def settled(self, chat: Chat, rollout: Rollout, asked: Asked) -> str:
        """Return the text of a running turn that stays; "" where a call or a thought may change how it is read."""
        written, text = (
            text_of(rollout, asked, decode) for decode in (self.tokens.text.decode_all, self.tokens.text.decode)
        )
        opens_thought = answer_start(written, self.tokens.text.end_of(chat.context)) != 0
        may_open_thought = written.lstrip()[:1] in ("", "<")
        if chat.tools or opens_thought or may_open_thought or without_headers(written) != written:
            return ""
        return settled_text(text, asked.sampling.stop_strings)

    def _logprobs(self, rollout: Rollout, asked: Asked) -> dict[str, Any]:
        def named(token: int, logprob: float) -> dict[str, Any]:
            texts = self.tokens.text
            return {"token": token_text(token, texts), "bytes": list(texts.bytes_of(token)), "logprob": logprob}

        sampled = zip(rollout.tokens.tolist(), logprobs_of(rollout, asked), top_of(rollout), strict=True)
        return {
            "content": [
                named(token, value) | {"top_logprobs": [named(*each) for each in top]} for token, value, top in sampled
            ]
        }

    def _memory(self, session: str | None, variables: Mapping[str, Any]) -> ChatMemory:
        name = json.dumps(variables, sort_keys=True)
        if name not in self._variants:
            self._variants[name] = self.tokens.with_variables(variables)
            if len(self._variants) > MAX_VARIANTS:
                self._variants.popitem(last=False)
        tokens = self._variants[name]
        self._variants.move_to_end(name)
        if session is None:
            return ChatMemory(tokens)
        memory = self._memories.setdefault((session, name), ChatMemory(tokens))
        self._memories.move_to_end((session, name))
        if len(self._memories) > MAX_SESSIONS:
            self._memories.popitem(last=False)
        return memory

    def _forget(self) -> None:
        """Forget the sessions idle longest until half of the limit is free."""
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
        raise InputError(f"{name} must be a list of JSON objects, got the element {wrong!r:.80}")
    return [value for value in values if isinstance(value, dict)]
