"""What an environment asks: a chat's next turn, or tokens after tokens; each answer is a call of the run's log."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treering.data.trajectory import ToolCall
from treering.engine.host import EngineHost
from treering.engine.request import Request, Sampling, check_prompt
from treering.engine.rollout import FinishReason, Rollout
from treering.engine.sampling.noise import call_id
from treering.errors import InputError, StateError
from treering.rl.environments.calls import Call
from treering.rl.environments.chat import (
    ChatMemory,
    ChatTokens,
    Messages,
    as_messages,
    as_tools,
    split_calls,
    turn_message,
)
from treering.rl.environments.waiting import TurnClock
from treering.types import PromptId, TokenIds

FIRST_AGENT = "policy"
"""The agent that a run begins with."""


class ContextFullError(InputError):
    """The context has no room for another token; an environment that catches it may still give a reward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The answer of `Policy.sample`."""

    call: int
    """Number of the call in its run."""
    tokens: TokenIds
    """int32 [N], N >= 1; a stop token is the last one."""
    logprobs: "np.ndarray[Any, np.dtype[np.float64]]"
    """float64 [N], of the distribution sampled from."""
    finish_reason: FinishReason
    """"stop", or "length" where it was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """The answer of `Policy.chat`.

    Example: a turn `{"name": "add", "arguments": {"a": 1}}` has the text "" and one tool call.
    """

    call: int
    """Number of the call in its run, for `Outcome.turn_rewards`."""
    text: str
    """Without special tokens and without the tool calls."""
    tool_calls: tuple[ToolCall, ...]
    """Only where tools were given."""
    finish_reason: FinishReason
    """"stop", or "length" where it was cut off."""
    message: Mapping[str, Any]
    """The turn as a message, to append to the chat: the next turn then goes on after the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """How long contexts and turns may be.

    Example: with `max_context=100` and `max_turn_tokens=32`, a context of 90 tokens leaves a turn of 10.
    """

    max_context: int
    """Tokens of a context and the turn after it."""
    max_turn_tokens: int
    """Tokens of a turn."""

    def turn_tokens(self, num_context: int, wanted: int | None) -> int:
        """Tokens of the turn after a context.

        Raises:
            InputError: a turn of no token is wanted.
            ContextFullError: there is no room for one.
        """
        if wanted is not None and wanted < 1:
            raise InputError(f"a turn has at least one token, got max_tokens={wanted}; raise it")
        room = self.max_context - num_context
        if room < 1:
            raise ContextFullError(
                f"a context and its turn have at most {self.max_context} tokens (sampling.max_tokens), and the context "
                f"alone has {num_context}; raise it, shorten the chat, or catch ContextFullError and give a reward"
            )
        return min(room, self.max_turn_tokens, *([] if wanted is None else [wanted]))


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One run's calls: its key, its log, and what its agents are.

    Example: a session without calls has an empty `calls`.
    """

    host: EngineHost
    prompt_id: PromptId
    draw: int
    sample: int
    sampling: Sampling
    limits: CallLimits
    chat: ChatTokens
    calls: dict[int, Call] = field(default_factory=dict)
    clock: TurnClock = field(default_factory=lambda: TurnClock(lambda: 0))
    """Of the run's turns and waits."""
    rank: int = 0
    """Of the run's calls, where calls queue; the lowest is first."""
    trainable: dict[str, bool] = field(default_factory=dict)
    _num_asked: int = 0
    _times: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    _open: set[Future[Rollout]] = field(default_factory=set)
    _is_closed: bool = False

    @property
    def num_asked(self) -> int:
        """Calls so far, whether they were answered or not."""
        return self._num_asked

    def rename(self, agent_of: Callable[[Call], str], trainable: Mapping[str, bool]) -> None:
        """Gives calls to the agents that made them, once these are known, with whether each is trained."""
        self.calls = {number: replace(call, agent=agent_of(call)) for number, call in self.calls.items()}
        self.trainable = dict(trainable)

    def close(self) -> None:
        """Aborts open calls and refuses later ones."""
        self._is_closed = True
        for answer in list(self._open):
            answer.cancel()

    async def ask(self, agent: str, context: TokenIds, sampling: Sampling, *, noise: str | None = None) -> Call:
        """Samples after a context and logs the call.

        Args:
            agent: who asks.
            context: int32 [N].
            sampling: of this call.
            noise: what names the call's noise in place of an agent whose name is another in each run.
        """
        if self._is_closed:
            raise StateError("the episode of this policy has ended, and it answers no more calls")
        noise = agent if noise is None else noise
        number, asked = self._num_asked, (noise, context.tobytes())
        noise_id = call_id(context, self._times[asked], noise)
        self._num_asked += 1
        self._times[asked] += 1
        request = Request(
            prompt_id=self.prompt_id,
            prompt=context,
            sampling=sampling,
            draw=self.draw,
            sample=self.sample,
            call=noise_id,
        )
        answer = self.host.submit(request, rank=self.rank)
        self._open.add(answer)
        self.clock.note_asked()
        num_tokens = 0
        try:
            rollout = await asyncio.wrap_future(answer)
            num_tokens = rollout.num_tokens
        finally:
            self._open.discard(answer)
            self.clock.note_answered(num_tokens)
        self.calls[number] = call = Call(number=number, agent=agent, context=context, rollout=rollout)
        return call


class Policy:
    """The model under training, or one agent of several that it plays."""

    def __init__(self, session: Session, agent: str = FIRST_AGENT, *, trainable: bool = True) -> None:
        """`trainable`: whether what the agent samples is trained."""
        if session.trainable.setdefault(agent, trainable) != trainable:
            raise InputError(f"the agent {agent!r} is trained or not, and it was both in one run; use two names")
        self._session, self._agent = session, agent
        self._memory = ChatMemory(session.chat)

    @property
    def session(self) -> Session:
        """The run's calls, for an environment that asks by another door."""
        return self._session

    def agent(self, name: str, *, trainable: bool = True) -> "Policy":
        """Another agent of the run, with chats of its own; its runs are compared with its own in other runs.

        Args:
            name: of the agent, the same in each run.
            trainable: False for one whose tokens are not trained, such as a critic or a user simulator.

        Raises:
            InputError: the run has had it with another `trainable`.
        """
        return Policy(self._session, name, trainable=trainable)

    def encode(self, text: str) -> TokenIds:
        """The ids of a text, int32 [N]."""
        return self._session.chat.text.encode(text)

    def decode(self, tokens: TokenIds) -> str:
        """The text of ids, without special tokens."""
        return self._session.chat.text.decode(np.asarray(tokens, np.int32))

    async def sample(
        self, tokens: Sequence[int] | TokenIds, *, max_tokens: int | None = None, stop: Sequence[int] = ()
    ) -> Sampled:
        """Samples after the given ids, to a stop token or the longest turn.

        Args:
            tokens: the whole context, at least one id.
            max_tokens: of this turn; None, or more than task.max_turn_tokens, is that.
            stop: ids that end the turn besides those of the tokenizer.

        Raises:
            InputError: no ids, or ids that the model does not have.
            ContextFullError: no room for another token.
        """
        call = await self._ask(np.array(tokens, None if len(tokens) else np.int32), max_tokens, stop)
        rollout = call.rollout
        return Sampled(
            call=call.number, tokens=rollout.tokens, logprobs=rollout.logprobs, finish_reason=rollout.finish_reason
        )

    async def chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        """The next turn of a chat.

        Args:
            messages: from the first one on, in OpenAI's spelling or as `Message`; with the messages of earlier replies
                in it, the chat goes on after the ids that were sampled.
            tools: JSON schemas for the chat template (the plain form shows none); with any, tool calls are read.
            max_tokens: of this turn; None, or more than task.max_turn_tokens, is that.

        Raises:
            InputError: messages that cannot be rendered.
            ContextFullError: no room for another token.
        """
        records, schemas = as_messages(messages), as_tools(tools)
        context = self._memory.context(records, schemas)
        call = await self._ask(context, max_tokens, ())
        text = self.decode(call.rollout.tokens)
        text, found = split_calls(text) if schemas else (text, ())
        calls = tuple(replace(each, id=f"call_{call.number}_{i}") for i, each in enumerate(found))
        message = turn_message(text, calls)
        self._memory.note([*records, *as_messages([message])], schemas, call.path)
        return Reply(
            call=call.number,
            text=text,
            tool_calls=calls,
            finish_reason=call.rollout.finish_reason,
            message=message,
        )

    async def _ask(self, context: TokenIds, max_tokens: int | None, stop: Sequence[int]) -> Call:
        session = self._session
        check_prompt(session.prompt_id, context)
        sampling = replace(
            session.sampling,
            max_tokens=session.limits.turn_tokens(context.size, max_tokens),
            stop_tokens=tuple(dict.fromkeys([*session.sampling.stop_tokens, *map(int, stop)])),
        )
        return await session.ask(self._agent, context.astype(np.int32), sampling)
