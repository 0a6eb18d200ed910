"""Interface of an environment to the policy: the next turn of a chat, or tokens after tokens. Each answer is a call.

Only the log of calls is trained: a token is trained if and only if a kept call sampled it, once for each such call,
with the log-probs and the policy version it had then. Trajectories are the maximal paths of read and sampled tokens.
    T tokens of a path
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.data.trajectory import ToolCall, Turn
from treering.engine.host import EngineHost
from treering.engine.protocol import FinishReason, Request, Rollout, Sampling, check_prompt
from treering.engine.sampling.noise import call_id
from treering.errors import ContextFullError, InputError, StateError
from treering.rl.environments.chat import ChatMemory, ChatTokens, Messages, as_messages, as_tools
from treering.types import LossMask, PromptId, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """An answered call."""

    number: int
    """Number in its run, in the order of requests."""
    agent: str
    """Agent that asked."""
    context: TokenIds
    """int32 [C], context of the rollout."""
    rollout: Rollout
    """The sampled tokens."""

    @property
    def path(self) -> TokenIds:
        """Context and sampled tokens, int32."""
        return np.concatenate([self.context, self.rollout.tokens])


class Branch:
    """A trajectory: a path with the calls that it trains.

    Example: two calls [5, 6] -> [7] and [5, 6, 7, 8] -> [9] give the branch [5, 6, 7, 8, 9] with the turns
    [-1, -1, 0, -1, 1].
    """

    def __init__(self, last: Call) -> None:
        """Take the path of its last call, without training any call."""
        self.tokens = last.path
        """int32 [T]."""
        self.turns = np.full(self.tokens.size, -1, np.int32)
        """int32 [T], index of the call that trains each token; -1 for tokens that are not trained here."""
        self.logprobs, self.policy_logprobs = np.zeros(self.tokens.size), np.zeros(self.tokens.size)
        """float64 [T] each, as in `Rollout`; 0 for tokens that are not trained here."""
        self.routed_experts = last.rollout.routed_experts
        """int16 [T - 1, layers, experts per token], those of the last call, which computed the whole path again."""
        self.first = -1
        """Index of the first trained call."""
        self._versions = np.zeros(self.tokens.size, np.int32)

    @property
    def loss_mask(self) -> LossMask:
        """Bool [T], True for trained tokens."""
        return self.turns >= 0

    @property
    def versions(self) -> NDArray[np.int32]:
        """int32 [T], policy version that sampled each token; read tokens get that of the next call, which read them."""
        size = self.tokens.size
        sampled = np.where(self.turns >= 0, np.arange(size), size - 1)
        return self._versions[np.minimum.accumulate(sampled[::-1])[::-1]]

    def takes(self, index: int, call: Call) -> bool:
        """Train a call if it is on this path and no other call trains its tokens; return whether it is trained."""
        num_read, rollout = call.context.size, call.rollout
        own = slice(num_read, num_read + rollout.num_tokens)
        is_on_path = np.array_equal(self.tokens[own], rollout.tokens) and np.array_equal(
            self.tokens[:num_read], call.context
        )
        if not is_on_path or (self.turns[own] >= 0).any():
            return False
        self.first = index if self.first < 0 else min(self.first, index)
        self.turns[own] = index
        self.logprobs[own], self.policy_logprobs[own] = rollout.logprobs, rollout.policy_logprobs
        self._versions[own] = call.rollout.versions
        return True


def branches_of(calls: Sequence[Call]) -> list[Branch]:
    """Return the trajectories of an agent's calls, in the order of the first call that each trains.

    They are the maximal paths. Two calls that sampled the same tokens after the same context are two samples, so the
    second one gets its own branch, which costs nothing in a forest.

    Example: the calls [5] -> [6], [5, 6, 1] -> [7] and [5, 6, 2] -> [8] give two branches; the first trains 6 and 7,
    the second 8.
    """
    found: list[Branch] = []
    # Longest first, so that no path begins with a later one.
    for index, call in sorted(
        enumerate(sorted(calls, key=lambda call: call.number)), key=lambda item: -item[1].path.size
    ):
        if not any(branch.takes(index, call) for branch in found):
            found.append(Branch(call))
            found[-1].takes(index, call)
    return sorted(found, key=lambda branch: branch.first)


_DIGITS = 4
"""Decimals of logged seconds: a tenth of a millisecond."""


class TurnClock:
    """Clock of a run's calls; the run waits while no call is open.

    Only pauses count: an episode that continues at once, without waiting for a time, a file or another thread, has
    waits of exactly 0, so that forecasts from them repeat bitwise.

    Example: a call of 8 tokens, a tool that takes 2 s and a call of 5 tokens give the turns (8, 2.0) and (5, 0.0).
    Calls that are open at the same time are one turn.
    """

    def __init__(self, num_pauses: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin the run.

        Args:
            num_pauses: returns how often the event loop has had nothing to run.
            now_s: reads a clock.
        """
        self._num_pauses, self._now_s = num_pauses, now_s
        self._turns: list[Turn] = []
        self._num_open = self._num_tokens = 0
        self._since = self._mark()

    def note_asked(self) -> None:
        """Count a call that waits for its answer."""
        if self._num_open == 0:
            self._note_wait()
        self._num_open += 1

    def note_answered(self, num_tokens: int) -> None:
        """Count the end of a call with `num_tokens` tokens; 0 if it was cancelled."""
        self._num_open -= 1
        self._num_tokens += num_tokens
        if self._num_open == 0:
            self._turns.append(Turn(self._num_tokens, 0.0))
            self._num_tokens, self._since = 0, self._mark()

    def turns(self) -> tuple[Turn, ...]:
        """Return the turns of the run, which ends now."""
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
"""Name of the first agent of a run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Answer of `Policy.sample`."""

    call: int
    """Number of the call in its run."""
    tokens: TokenIds
    """int32 [N], N >= 1; a stop token comes last."""
    logprobs: "np.ndarray[Any, np.dtype[np.float64]]"
    """float64 [N], log-probs of the distribution sampled from."""
    finish_reason: FinishReason
    """stop, or length if the turn was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """Answer of `Policy.chat`.

    Example: a turn `{"name": "add", "arguments": {"a": 1}}` has the text "" and one tool call.
    """

    call: int
    """Number of the call in its run, for `Outcome.turn_rewards`."""
    text: str
    """Text after the thought, without special tokens and tool calls; "" if the thought does not end."""
    tool_calls: tuple[ToolCall, ...]
    """Calls after the thought; only read if tools were given."""
    finish_reason: FinishReason
    """stop, or length if the turn was cut off."""
    message: Mapping[str, Any]
    """The turn as a message with its thought; appended to the chat, it lets the next turn continue the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits on the length of contexts and turns."""

    max_context: int
    """Most tokens of a context and the turn after it."""
    max_turn_tokens: int
    """Most tokens of a turn."""

    def turn_tokens(self, num_context: int, wanted: int | None) -> int:
        """Return the most tokens that the turn after a context may have.

        Raises:
            InputError: `wanted` is less than one token.
            ContextFullError: the context leaves no room for a token.
        """
        if wanted is not None and wanted < 1:
            raise InputError(f"a turn needs at least one token, got max_tokens={wanted}; raise it")
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
    """Calls of one run: its key, its log, and its agents."""

    host: EngineHost
    prompt_id: PromptId
    draw: int
    sample: int
    sampling: Sampling
    limits: CallLimits
    chat: ChatTokens
    calls: dict[int, Call] = field(default_factory=dict)
    clock: TurnClock = field(default_factory=lambda: TurnClock(lambda: 0))
    """Clock of the run's turns and waits."""
    rank: int = 0
    """Priority of the run's calls if calls queue; the lowest is first."""
    trainable: dict[str, bool] = field(default_factory=dict)
    _num_asked: int = 0
    _times: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    _open: set[Future[Rollout]] = field(default_factory=set)
    _is_closed: bool = False

    @property
    def num_asked(self) -> int:
        """Calls so far, answered or not."""
        return self._num_asked

    def rename(self, agent_of: Callable[[Call], str], trainable: Mapping[str, bool]) -> None:
        """Assign calls to the agents that made them, once these are known, and set which agents are trained."""
        self.calls = {number: replace(call, agent=agent_of(call)) for number, call in self.calls.items()}
        self.trainable = dict(trainable)

    def close(self) -> None:
        """Abort open calls and refuse later ones."""
        self._is_closed = True
        for answer in list(self._open):
            answer.cancel()

    async def ask(self, agent: str, context: TokenIds, sampling: Sampling, *, noise: str | None = None) -> Call:
        """Sample after a context and log the call.

        Args:
            agent: name of the asking agent.
            context: int32 [N].
            sampling: sampling parameters of this call.
            noise: name for the call's noise, for agents whose name differs between runs.
        """
        if self._is_closed:
            raise StateError(
                "the episode of this policy has ended, so it answers no more calls; await all calls in run()"
            )
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
    """The model under training, or one of several agents that it plays."""

    def __init__(self, session: Session, agent: str = FIRST_AGENT, *, trainable: bool = True) -> None:
        """Join the run as an agent; `trainable` decides whether its sampled tokens are trained."""
        if session.trainable.setdefault(agent, trainable) != trainable:
            raise InputError(f"an agent is either trained or not, got both for {agent!r} in one run; use two names")
        self._session, self._agent = session, agent
        self._memory = ChatMemory(session.chat)

    @property
    def session(self) -> Session:
        """The run's calls, for environments that make calls without this class."""
        return self._session

    def agent(self, name: str, *, trainable: bool = True) -> "Policy":
        """Return another agent of the run, with its own chats; its runs are compared with its own in other runs.

        Args:
            name: name of the agent, the same in each run.
            trainable: False for an agent whose tokens are not trained, such as a critic or a user simulator.

        Raises:
            InputError: the run already has this agent with another `trainable`.
        """
        return Policy(self._session, name, trainable=trainable)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text, int32 [N]."""
        return self._session.chat.text.encode(text)

    def decode(self, tokens: TokenIds) -> str:
        """Return the text of ids, without special tokens."""
        return self._session.chat.text.decode(np.asarray(tokens, np.int32))

    async def sample(
        self, tokens: Sequence[int] | TokenIds, *, max_tokens: int | None = None, stop: Sequence[int] = ()
    ) -> Sampled:
        """Sample after the given ids until a stop token or the maximum turn length.

        Args:
            tokens: the whole context, at least one id.
            max_tokens: limit of this turn; None or a larger value means task.max_turn_tokens.
            stop: ids that end the turn in addition to the tokenizer's.

        Raises:
            InputError: no ids, or ids that the model does not have.
            ContextFullError: the context leaves no room for a token.
        """
        call = await self._ask(np.array(tokens, None if len(tokens) else np.int32), max_tokens, stop)
        rollout = call.rollout
        return Sampled(
            call=call.number, tokens=rollout.tokens, logprobs=rollout.logprobs, finish_reason=rollout.finish_reason
        )

    async def chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        """Sample the next turn of a chat.

        Args:
            messages: the whole chat, in OpenAI's format or as `Message`; a chat with the messages of earlier replies
                continues the sampled ids.
            tools: JSON schemas for the chat template (the plain form shows none); with any, tool calls are read in the
                template's own format.
            max_tokens: limit of this turn; None or a larger value means task.max_turn_tokens.

        Raises:
            InputError: the messages cannot be rendered.
            UnsupportedError: there are tools, but the chat template's calls cannot be read.
            ContextFullError: the context leaves no room for a token.
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
