"""Rehearsed rollouts of a loop's next batch, and how much of them is kept; see `treering.engine.rehearsals`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treering.data.trajectory import Rehearsed
from treering.engine.kv_cache import count_common
from treering.engine.protocol import Engine, EngineStats, Request, Rollout, RolloutKey
from treering.types import TokenIds

if TYPE_CHECKING:
    from treering.ranks.group import RankGroup

Rehearse = Literal["auto", "on", "off"]

_FEW = 8
"""Rollouts that "auto" rehearses to learn how often a token changes."""
_ENOUGH = 128
"""Verified tokens after which the rate of changes counts as known."""
_REST = 16
"""Batches without rehearsals after they did not pay, before a few are tried again."""
_KEPT_COUNTS = 0.8
"""Factor of old counts per batch, because the rate of changes moves with the learning rate."""


def kept_share(change: float, length: float) -> float:
    """Return the share of a rollout's tokens before the first change, if each token changes with this chance.

    Example: if chance times length is 0.1, 1 and 4, the share is 0.95, 0.63 and 0.25; without changes it is 1.0.
    """
    expected = change * length
    return 1.0 if expected <= 0 else (1.0 - (1.0 - min(change, 1.0)) ** length) / expected


class Rehearsal:
    """Chooses the rollouts that an engine rehearses during a batch, and keeps their tokens for their own batch.

    "auto" rehearses if the kept share of a rollout is above `Engine.row_price`, the cost of sampling a token early and
    verifying it. It counts tokens and reads no clock, so that a resumed run decides the same.

    Example: if each of 100 tokens changes with a chance of 0.04, 0.25 of the rollout is kept: too little at a price of
    0.4.
    """

    def __init__(self, mode: Rehearse) -> None:
        """`mode`: "on" rehearses everything that fits, "off" nothing."""
        self._mode = mode
        self.tokens: Mapping[RolloutKey, TokenIds] = {}
        """Rehearsed tokens of the next batch."""
        self._num_kept = self._num_changed = self._length = 0.0
        self._num_rests = 0

    def is_on(self, engine: Engine) -> bool:
        """Return whether an engine may rehearse: with "auto" not where each row takes time."""
        return self._mode == "on" or (self._mode == "auto" and engine.row_price < 1.0)

    def begin(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Let an engine rehearse the requests of the next batch that pay, in order."""
        chosen = self._chosen(engine, requests)
        if chosen:
            engine.rehearse(chosen)

    def end(self, engine: Engine) -> None:
        """Take the rehearsed tokens; with "auto" only the beginning that is likely enough to be kept."""
        taken = engine.take_rehearsals()
        most = self._most_tokens(engine.row_price / 2)
        self.tokens = {key: tokens[:most] for key, tokens in taken.items() if tokens.size > 0}

    def note(self, stats: EngineStats, lengths: Sequence[int], rank_group: "RankGroup") -> None:
        """Learn from a batch, with all ranks: how much of its rehearsals was kept, and how long its rollouts were."""
        parts = rank_group.gather((self.tokens, stats)) if rank_group.size > 1 else [(self.tokens, stats)]
        self.tokens = {key: tokens for own, _ in parts for key, tokens in own.items()}
        self._num_kept = _KEPT_COUNTS * self._num_kept + sum(own.num_kept for _, own in parts)
        self._num_changed = _KEPT_COUNTS * self._num_changed + sum(own.num_changed for _, own in parts)
        self._length = sum(lengths) / len(lengths) if lengths else self._length

    def rest_of(self, rollout: Rollout) -> TokenIds:
        """Return a finished rollout's rehearsed tokens after the first change; other rollouts may draft from them."""
        tokens = self.tokens.get(rollout.key, rollout.tokens[:0])
        num_kept = count_common(tokens, rollout.tokens)
        return tokens[num_kept + 1 :] if num_kept < min(tokens.size, rollout.num_tokens) else tokens[:0]

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state; a loop that loses it samples the tokens again, with the same result."""
        return {
            "tokens": [[*key, tokens.tolist()] for key, tokens in self.tokens.items()],
            "counts": [self._num_kept, self._num_changed, self._length, self._num_rests],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.tokens = {tuple(key): np.array(tokens, np.int32) for *key, tokens in state["tokens"]}
        self._num_kept, self._num_changed, self._length, self._num_rests = state["counts"]

    def _chosen(self, engine: Engine, requests: Sequence[Request]) -> Sequence[Request]:
        if not self.is_on(engine):
            return ()
        if self._mode == "on":
            return requests
        if self._num_kept + self._num_changed < _ENOUGH * _KEPT_COUNTS**_REST:
            return requests[:_FEW]
        if kept_share(self._change, self._length) > engine.row_price:
            self._num_rests = 0
            return requests
        self._num_rests = (self._num_rests + 1) % _REST
        return () if self._num_rests else requests[:_FEW]

    @property
    def _change(self) -> float:
        return self._num_changed / max(self._num_kept + self._num_changed, 1.0)

    def _most_tokens(self, price: float) -> int | None:
        """Return the number of tokens to verify: up to the first that is less likely to be reached than its price."""
        if self._mode == "on" or not 0 < self._change < 1 or price <= 0:
            return None
        return max(1, math.ceil(math.log(price) / math.log1p(-self._change)))


def with_rehearsed(requests: Sequence[Request], tokens: Mapping[RolloutKey, TokenIds]) -> list[Request]:
    """Return the requests with the rehearsed tokens of each."""
    return [replace(each, rehearsed=tokens[each.key]) if each.key in tokens else each for each in requests]


def with_kept(rollout: Rollout, tokens: Mapping[RolloutKey, TokenIds]) -> Rollout:
    """Return a finished rollout with how many of its rehearsed tokens it kept, if there are any."""
    early = tokens.get(rollout.key)
    if early is None:
        return rollout
    return replace(rollout, rehearsed=Rehearsed(early.size, count_common(early, rollout.tokens)))
