"""What an environment asks: a chat's next turn, or tokens after tokens. Each answer is a call of the run's log.

What a policy is trained on is this log alone: a token is trained if and only if a kept call sampled it, once for each
call that did, with the log-probs and the policy version that it had. Its trajectories are the maximal paths of what was
read and sampled.

    T tokens of a path
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treering.data.trajectory import ToolCall, Turn
from treering.engine.host import EngineHost
from treering.engine.protocol import FinishReason, Logprobs, Request, Rollout, Sampling, check_prompt
from treering.engine.sampling.noise import call_id
from treering.errors import ContextFullError, InputError, StateError
from treering.rl.environments.chat import (
    ChatMemory,
    ChatTokens,
    Messages,
    as_messages,
    as_tools,
)
from treering.types import LossMask, PromptId, TokenIds

SharedTurns = Literal["once", "sum"]
"""Sampled tokens that several trajectories of a run go through. once: one of these trains them. sum: each does, as in
training that takes the trajectories for separate rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One answered call.

    Example: the context [5, 6] and a rollout of the tokens [7, 8] have the path [5, 6, 7, 8].
    """

    number: int
    """Of its run, in the order in which the calls were asked for."""
    agent: str
    """The seat that asked."""
    context: TokenIds
    """int32 [C], what it continues."""
    rollout: Rollout
    """What was sampled."""

    @property
    def path(self) -> TokenIds:
        """int32, the context and what was sampled after it."""
        return np.concatenate([self.context, self.rollout.tokens])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A trajectory: a path with the calls that it trains.

    Example: two calls [5, 6] -> [7] and [5, 6, 7, 8] -> [9] are the branch [5, 6, 7, 8, 9] with the turns
    [-1, -1, 0, -1, 1].
    """

    tokens: TokenIds
    """int32 [T]."""
    turns: NDArray[np.int32]
    """int32 [T], index among the calls of the call that trains a token; -1 for tokens that are not trained here."""
    logprobs: Logprobs
    """float64 [T], as in `Rollout`; 0 for tokens that are not trained here."""
    policy_logprobs: Logprobs
    """float64 [T], likewise."""
    versions: NDArray[np.int32]
    """int32 [T], policy version that sampled each token, or read it last."""

    @property
    def loss_mask(self) -> LossMask:
        """Bool [T]."""
        return self.turns >= 0


def branches_of(calls: Sequence[Call], shared: SharedTurns = "once") -> list[Branch]:
    """The trajectories of a seat's calls, in the order of the first call that each trains.

    They are the maximal paths. Two calls that sampled the same tokens after the same context are two samples, so the
    second one gets a branch of its own, which costs nothing in a forest.

    Example: the calls [5] -> [6], [5, 6, 1] -> [7] and [5, 6, 2] -> [8] are two branches; the first trains 6 and 7, the
    second 8, or 6 and 8 with "sum".
    """
    asked = sorted(calls, key=lambda call: call.number)
    # Longest first, so that a path never begins with one that comes later.
    order = sorted(range(len(asked)), key=lambda i: -asked[i].path.size)
    open_branches: list[_OpenBranch] = []
    for i in order:
        path = asked[i].path
        text = path.tobytes()
        homes = [branch for branch in open_branches if branch.text.startswith(text) and branch.is_free(asked[i])]
        if not homes:
            homes = [_OpenBranch(path, text)]
            open_branches += homes
        for branch in homes if shared == "sum" else homes[:1]:
            branch.take(i, asked[i])
    return [branch.close() for branch in sorted(open_branches, key=lambda branch: min(branch.owned))]


class _OpenBranch:
    """A path that calls are added to."""

    def __init__(self, path: TokenIds, text: bytes) -> None:
        self.text = text
        self.owned: list[int] = []
        self._path = path
        self._turns = np.full(path.size, -1, np.int32)
        self._logprobs, self._policy_logprobs = np.zeros(path.size), np.zeros(path.size)
        self._versions = np.zeros(path.size, np.int32)

    def is_free(self, call: Call) -> bool:
        """Whether no other call trains what this one sampled."""
        return bool((self._turns[_sampled(call)] < 0).all())

    def take(self, index: int, call: Call) -> None:
        own = _sampled(call)
        self.owned.append(index)
        self._turns[own] = index
        self._logprobs[own], self._policy_logprobs[own] = call.rollout.logprobs, call.rollout.policy_logprobs
        self._versions[own] = call.rollout.versions

    def close(self) -> Branch:
        # What was read has the version of the next call, which read it.
        read = self._versions[np.minimum.accumulate(_next_sampled(self._turns)[::-1])[::-1]]
        return Branch(
            tokens=self._path,
            turns=self._turns,
            logprobs=self._logprobs,
            policy_logprobs=self._policy_logprobs,
            versions=np.where(self._turns >= 0, self._versions, read).astype(np.int32),
        )


def _next_sampled(turns: NDArray[np.int32]) -> NDArray[np.int64]:
    """Each sampled token's own index, and the last index for the others; a path ends with a sampled token."""
    return np.where(turns >= 0, np.arange(turns.size), turns.size - 1)


def _sampled(call: Call) -> slice:
    return slice(call.context.size, call.context.size + call.rollout.num_tokens)


_DIGITS = 4
"""Of logged seconds: a tenth of a millisecond."""


class TurnClock:
    """Notes when a run's calls are asked and answered; it waits while none is open.

    Only pauses count: of an episode that goes on at once, without waiting for a time, a file or another thread, all
    waits are exactly 0, so that what is forecast from them repeats bitwise.

    Example: a call of 8 tokens, a tool that takes 2 s and a call of 5 tokens are the turns (8, 2.0) and (5, 0.0). Calls
    that are open at the same time are one turn.
    """

    def __init__(self, num_pauses: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        """Begins the run.

        Args:
            num_pauses: how often the loop of the episodes has had nothing to run so far.
            now_s: reads a clock.
        """
        self._num_pauses, self._now_s = num_pauses, now_s
        self._turns: list[Turn] = []
        self._num_open = self._num_tokens = 0
        self._since = self._mark()

    def note_asked(self) -> None:
        """Counts a call that waits for its answer."""
        if self._num_open == 0:
            self._note_wait()
        self._num_open += 1

    def note_answered(self, num_tokens: int) -> None:
        """A call has ended with so many tokens; 0 if it was left."""
        self._num_open -= 1
        self._num_tokens += num_tokens
        if self._num_open == 0:
            self._turns.append(Turn(self._num_tokens, 0.0))
            self._num_tokens, self._since = 0, self._mark()

    def turns(self) -> tuple[Turn, ...]:
        """The turns of the run, which ends now."""
        if self._num_open == 0:
            self._note_wait()
        return tuple(self._turns)

    def _note_wait(self) -> None:
        num_pauses, since = self._since
        wait_s = round(self._now_s() - since, _DIGITS) if self._num_pauses() > num_pauses else 0.0
        if self._turns:
            self._turns[-1] = self._turns[-1]._replace(wait_s=wait_s)
        elif wait_s > 0:
            self._turns.append(Turn(0, wait_s))

    def _mark(self) -> tuple[int, float]:
        return self._num_pauses(), self._now_s()


FIRST_AGENT = "policy"
"""The agent that a run begins with."""


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
    """What follows the thought, without special tokens and without the tool calls; "" where the thought has no end."""
    tool_calls: tuple[ToolCall, ...]
    """Those after the thought, only where tools were given."""
    finish_reason: FinishReason
    """"stop", or "length" where it was cut off."""
    message: Mapping[str, Any]
    """The turn as a message with its thought, to append to the chat: the next turn goes on after the sampled tokens."""


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
                f"the maximum context length is {self.max_context} tokens with the turn (sampling.max_tokens), and the "
                f"context alone has {num_context}; raise it, shorten the chat, or catch ContextFullError and give a "
                "reward"
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
            tools: JSON schemas for the chat template (the plain form shows none); with any, tool calls are read in the
                template's own form.
            max_tokens: of this turn; None, or more than task.max_turn_tokens, is that.

        Raises:
            InputError: messages that cannot be rendered.
            UnsupportedError: tools, under a chat template whose calls cannot be read.
            ContextFullError: no room for another token.
        """
        records, schemas = as_messages(messages), as_tools(tools)
        context = self._memory.context(records, schemas)
        call = await self._ask(context, max_tokens, ())
        turn = self._session.chat.read(context, lambda decode: decode(call.rollout.tokens), schemas)
        turn = turn.with_ids(call.number)
        self._memory.note([*records, *as_messages([turn.message])], schemas, call.path)
        return Reply(
            call=call.number,
            text=turn.text,
            tool_calls=turn.calls,
            finish_reason=call.rollout.finish_reason,
            message=turn.message,
        )

    async def _ask(self, context: TokenIds, max_tokens: int | None, stop: Sequence[int]) -> Call:
        session = self._session
        check_prompt(session.prompt_id, context)
        sampling = session.sampling.changed(
            max_tokens=session.limits.turn_tokens(context.size, max_tokens),
            stop_tokens=tuple(dict.fromkeys([*session.sampling.stop_tokens, *map(int, stop)])),
        )
        return await session.ask(self._agent, context.astype(np.int32), sampling)
