"""Who answers the calls of a server: an engine's host, or whatever knows the episodes that calls belong to.

The host's calls are named so that each has noise of its own and those who ask for it get equal answers. A call with a
seed is named by its context and the seed: the same call gives the same answer. One with an identity, in `cache_salt` or
the header X-Session-ID, is named by it, its context and how often it has sampled that context before. Any other call is
named by its number.
"""

import asyncio
import itertools
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from treering.engine.host import EngineHost
from treering.engine.request import Request, Sampling
from treering.engine.rollout import Rollout, RolloutKey
from treering.engine.sampling.noise import call_id
from treering.serving.sampling_params import Asked
from treering.types import PromptId, TokenIds

MAX_IDENTITIES = 65536
"""Identities whose calls are counted; those that were quiet for longest are forgotten first."""


_EPISODE = re.compile(r"(?P<task>.*)\|(?P<draw>\d{1,9})\|(?P<sample>\d{1,9})", re.DOTALL)


class Calls:
    """Makes the requests of calls.

    Example: two calls of the identity "q1|0|3" with equal contexts are rollouts of task "q1", draw 0 and sample 3, with
    two call ids.
    """

    def __init__(self) -> None:
        """Knows no identity."""
        self._numbers = itertools.count()
        self._counts: OrderedDict[str, Counter[int]] = OrderedDict()

    def requests(self, context: TokenIds, asked: Asked, identity: str | None) -> list[Request]:
        """One request for each sample that a call asks for.

        Args:
            context: int32 [N].
            asked: what the call asks for.
            identity: of an episode, "TASK|DRAW|SAMPLE", or of any other session; None for a call by itself.
        """
        sampling, num_samples = asked.sampling, asked.num_samples
        if identity is None and asked.seed is None:
            return [_request("", 0, next(self._numbers), context, sampling, None) for _ in range(num_samples)]
        prompt_id, draw, sample = _episode(identity or "")
        draw = draw if asked.seed is None else asked.seed
        if identity is None:
            calls = [call_id(context, i) for i in range(num_samples)]
        else:
            calls = [call_id(context, self._count(identity, call_id(context))) for _ in range(num_samples)]
        return [_request(prompt_id, draw, sample, context, sampling, call) for call in calls]

    def _count(self, identity: str, context: int) -> int:
        """How often an identity has sampled a context before, this time not counted."""
        counts = self._counts.setdefault(identity, Counter())
        self._counts.move_to_end(identity)
        if len(self._counts) > MAX_IDENTITIES:
            self._counts.popitem(last=False)
        counts[context] += 1
        return counts[context] - 1


def _episode(identity: str) -> tuple[str, int, int]:
    found = _EPISODE.fullmatch(identity)
    return (found["task"], int(found["draw"]), int(found["sample"])) if found else (identity, 0, 0)


def _request(
    prompt_id: PromptId, draw: int, sample: int, context: TokenIds, sampling: Sampling, call: int | None
) -> Request:
    return Request(prompt_id=prompt_id, draw=draw, sample=sample, prompt=context, sampling=sampling, call=call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as far as a call says it.

    Example: `Caller(identity="q1|0|3", session="trace-7")`
    """

    identity: str | None = None
    """`cache_salt` of the body."""
    session: str | None = None
    """The header X-Session-ID."""


class Sampler(Protocol):
    """Answers calls."""

    async def sample(self, context: TokenIds, asked: Asked, caller: Caller) -> list[Rollout]:
        """`asked.num_samples` answers after a context int32 [N]; cancelling it aborts them."""
        ...


class HostSampler:
    """Answers by an engine, which gets the calls as `Calls` names them.

    Example:
        >>> sampler = HostSampler(host)                                                         # doctest: +SKIP
    """

    def __init__(self, host: EngineHost) -> None:
        """`host` outlives it."""
        self._host = host
        self._calls = Calls()
        self._turns: WeakValueDictionary[RolloutKey, asyncio.Lock] = WeakValueDictionary()

    async def sample(self, context: TokenIds, asked: Asked, caller: Caller) -> list[Rollout]:
        """See `Sampler.sample`; one answer that fails aborts the others."""
        requests = self._calls.requests(context, asked, caller.identity or caller.session)
        try:
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(self._sample_one(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asking]

    async def _sample_one(self, request: Request) -> Rollout:
        """Waits for calls of the same key: equal calls with a seed may come at the same time."""
        turn = self._turns.setdefault(request.key, asyncio.Lock())
        async with turn:
            return await self._host.sample(request)
