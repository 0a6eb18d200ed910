"""Answers the calls of episodes that come over HTTP, each by the session of its episode."""

import asyncio
from dataclasses import replace

from treering.engine.request import Sampling
from treering.engine.rollout import Rollout
from treering.errors import InputError, StateError
from treering.rl.environments.policy import Session
from treering.serving.sampler import Caller
from treering.serving.sampling_params import Asked
from treering.types import TokenIds

_SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class EpisodeSampler:
    """A `Sampler` whose callers are episodes by their identity, and traces by their session.

    What a trace asks is logged in the session of its episode under the trace's id. Noise does not depend on that id,
    which is another one in each run.

    Example: the calls of the identity "q1|0|3" are answered by what `add("q1|0|3", session, loop)` has added.
    """

    def __init__(self) -> None:
        """Knows no episode."""
        self._episodes: dict[str, tuple[Session, asyncio.AbstractEventLoop]] = {}

    def add(self, identity: str, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        """Answers an episode's calls from now on, in the event loop of the session."""
        self._episodes[identity] = session, loop

    def remove(self, identity: str) -> None:
        """Refuses an episode's calls from now on."""
        self._episodes.pop(identity, None)

    async def sample(self, context: TokenIds, asked: Asked, caller: Caller) -> list[Rollout]:
        """See `Sampler.sample`.

        Raises:
            StateError: no such episode runs.
            InputError: other sampling parameters than those of the run.
            ContextFullError: the context is too long.
        """
        found = self._episodes.get(caller.identity or "")
        if found is None:
            raise StateError(f"no episode {caller.identity!r} runs here; it has ended, or its calls lost cache_salt")
        session, loop = found
        sampling = _sampling(session, context, asked)
        return [await self._ask(session, loop, caller, context, sampling) for _ in range(asked.num_samples)]

    async def _ask(
        self,
        session: Session,
        loop: asyncio.AbstractEventLoop,
        caller: Caller,
        context: TokenIds,
        sampling: Sampling,
    ) -> Rollout:
        asking = session.ask(caller.session or "", context, sampling, noise="")
        call = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, loop))
        return call.rollout


def _sampling(session: Session, context: TokenIds, asked: Asked) -> Sampling:
    own = session.sampling
    other = [name for name in _SHARED if getattr(asked.sampling, name) != getattr(own, name)]
    if other:
        raise InputError(
            f"the policy samples with the run's {other[0]} = {getattr(own, other[0])!r}, and an agent asked for "
            f"{getattr(asked.sampling, other[0])!r}; remove it from the agent's sampling, or set sampling.{other[0]}"
        )
    return replace(
        own,
        max_tokens=session.limits.turn_tokens(context.size, asked.sampling.max_tokens),
        stop_tokens=tuple(dict.fromkeys([*own.stop_tokens, *asked.sampling.stop_tokens])),
        stop_strings=asked.sampling.stop_strings or own.stop_strings,
    )
