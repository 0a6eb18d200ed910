"""Who answers the calls of a server: an engine's host, or whatever knows the episodes that calls belong to."""

import asyncio
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from treering.engine.host import EngineHost
from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.serving.calls import Calls
from treering.serving.sampling_params import Asked
from treering.types import TokenIds


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
    """Answers by an engine, with the names of `treering.serving.calls`.

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
