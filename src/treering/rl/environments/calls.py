"""The calls of a run and the trajectories that they are: the maximal paths of what was read and sampled.

What a policy is trained on is this log alone: a token is trained if and only if a kept call sampled it, once for each
call that did, with the log-probs and the policy version that it had.

    T tokens of a path
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treering.engine.rollout import Logprobs, Rollout
from treering.types import LossMask, TokenIds

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
