"""Which rollout a context of a later turn continues: TRL gives the tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treering.arrays import Int32Array
from treering.engine.request import Request
from treering.engine.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A rollout with the tokens that its environment wrote after it."""

    first: Request
    """The request of its last turn."""
    so_far: Rollout

    def request(self, max_new: int) -> Request:
        """The request that continues it by at most `max_new` tokens."""
        limit = self.so_far.num_tokens + max_new
        return replace(self.first, sampling=replace(self.first.sampling, max_tokens=limit), so_far=self.so_far)


class OpenTurns:
    """The rollouts of the latest calls that a context may continue.

    Example: after the rollout 7 8 of the prompt 5 6, the context 5 6 7 8 9 is that rollout with the observed token 9.
    """

    def __init__(self) -> None:
        """Starts without rollouts."""
        self._open: list[tuple[Int32Array, Request, Rollout]] = []

    def take(self, contexts: Sequence[Sequence[int]]) -> list[Turn | None]:
        """The rollout that each context continues, each at most once; None for a context that begins a rollout."""
        return [self._take_one(np.asarray(context, np.int32)) for context in contexts]

    def put(self, requests: Sequence[Request], rollouts: Sequence[Rollout]) -> None:
        """Takes the rollouts of a call; if all of them are first turns, they replace all earlier ones."""
        if all(request.so_far is None for request in requests):
            self._open.clear()
        for request, rollout in zip(requests, rollouts, strict=True):
            self._open.append((np.concatenate([request.prompt, rollout.tokens]), request, rollout))

    def _take_one(self, context: Int32Array) -> Turn | None:
        fitting = [
            at
            for at, (tokens, _, _) in enumerate(self._open)
            if tokens.size < context.size and np.array_equal(context[: tokens.size], tokens)
        ]
        if not fitting:
            return None
        # The longest is the newest turn of its rollout.
        tokens, request, rollout = self._open.pop(max(fitting, key=lambda at: self._open[at][0].size))
        return Turn(first=request, so_far=rollout.observe(context[tokens.size :]))
