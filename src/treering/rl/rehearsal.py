"""What a loop rehearses of its next batch, and what new weights have kept of it; see `treering.engine.rehearsals`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treering.engine.protocol import Engine, EngineStats, Request, Rollout, RolloutKey
from treering.types import TokenIds

if TYPE_CHECKING:
    from treering.ranks.group import RankGroup

Rehearse = Literal["auto", "on", "off"]

_FEW = 8
"""Rollouts that "auto" rehearses to learn how often a token changes."""
_ENOUGH = 128
"""Tokens drawn again after which it knows."""
_REST = 16
"""Batches without rehearsals where these do not pay, before a few are tried again."""
_KEPT_COUNTS = 0.8
"""Share of the counts that a further batch leaves: the chance of a change moves with the learning rate."""


def kept_share(change: float, length: float) -> float:
    """The share of a rollout's tokens before the first that changes, if each does with this chance.

    Example: 0.95, 0.63 and 0.25 where chance times length is 0.1, 1 and 4, and 1.0 where nothing changes.
    """
    expected = change * length
    return 1.0 if expected <= 0 else (1.0 - (1.0 - min(change, 1.0)) ** length) / expected


class Rehearsal:
    """Chooses what an engine rehearses while a batch is sampled, and holds its tokens until their batch.

    "auto" rehearses where the kept share of a rollout is above `Engine.row_price`, what sampling a token early and
    drawing it again cost. It counts tokens and reads no clock, so that a resumed run decides alike.

    Example: with tokens of 100 that change with a chance of 0.04, 0.25 of a rollout is kept: too little where the
    price is 0.4.
    """

    def __init__(self, mode: Rehearse) -> None:
        """`mode`: "on" rehearses whatever fits, "off" nothing."""
        self._mode = mode
        self.tokens: Mapping[RolloutKey, TokenIds] = {}
        """What was rehearsed of the next batch."""
        self._num_kept = self._num_changed = self._length = 0.0
        self._num_rests = 0

    @property
    def is_on(self) -> bool:
        """Whether anything may be rehearsed."""
        return self._mode != "off"

    def begin(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Lets an engine rehearse those of the next batch that pay, in order."""
        chosen = self._chosen(engine, requests)
        if chosen:
            engine.rehearse(chosen)

    def end(self, engine: Engine) -> None:
        """Takes what was rehearsed; of "auto" the beginning that is likely enough to stay."""
        taken = engine.take_rehearsals()
        most = self._most_tokens(engine.row_price / 2)
        self.tokens = {key: tokens[:most] for key, tokens in taken.items() if tokens.size > 0}

    def note(self, stats: EngineStats, lengths: Sequence[int], group: "RankGroup") -> None:
        """Learns from a batch: what was kept of its rehearsals, and how long its rollouts were; shared by all ranks."""
        parts = group.gather((self.tokens, stats)) if group.size > 1 else [(self.tokens, stats)]
        self.tokens = {key: tokens for own, _ in parts for key, tokens in own.items()}
        self._num_kept = _KEPT_COUNTS * self._num_kept + sum(own.num_kept for _, own in parts)
        self._num_changed = _KEPT_COUNTS * self._num_changed + sum(own.num_changed for _, own in parts)
        self._length = sum(lengths) / len(lengths) if lengths else self._length

    def rest_of(self, rollout: Rollout) -> TokenIds:
        """What was rehearsed of a finished rollout after the first token that changed; it may be a draft of others."""
        tokens = self.tokens.get(rollout.key, rollout.tokens[:0])
        size = min(tokens.size, rollout.num_tokens)
        changed = (tokens[:size] != rollout.tokens[:size]).nonzero()[0]
        return tokens[changed[0] + 1 :] if changed.size else tokens[:0]

    def state(self) -> dict[str, Any]:
        """For a checkpoint; a loop that loses it decodes what was rehearsed, which gives the same tokens."""
        return {
            "tokens": [[*key, tokens.tolist()] for key, tokens in self.tokens.items()],
            "counts": [self._num_kept, self._num_changed, self._length, self._num_rests],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`."""
        self.tokens = {tuple(key): np.array(tokens, np.int32) for *key, tokens in state["tokens"]}
        self._num_kept, self._num_changed, self._length, self._num_rests = state["counts"]

    def _chosen(self, engine: Engine, requests: Sequence[Request]) -> Sequence[Request]:
        if self._mode != "auto":
            return requests if self.is_on else ()
        if engine.row_price >= 1.0:
            return ()
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
        """How many tokens to draw again: until one is less likely to be reached than its price."""
        if self._mode == "on" or not 0 < self._change < 1 or price <= 0:
            return None
        return max(1, math.ceil(math.log(price) / math.log1p(-self._change)))


def with_rehearsed(requests: Sequence[Request], tokens: Mapping[RolloutKey, TokenIds]) -> list[Request]:
    """The requests with what was rehearsed of each.

    Example: with {("q", 1, 0): [7, 8]} that request has `rehearsed` [7, 8], and the others have none.
    """
    return [replace(each, rehearsed=tokens[each.key]) if each.key in tokens else each for each in requests]
