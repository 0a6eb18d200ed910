"""Sample rollouts before their step, with their own noise, and draw them again with their step's weights.

A token's noise is known before its weights are (law 5), so idle rows sample the next rollouts early. Under new weights
each token is drawn again with the same noise, many positions of a rollout in one pass, and stays the same unless the
update moved one logit past another. The kept tokens are exactly the ones that the new weights sample.

    B running rows
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Int64Array
from treering.engine.batch.rows import Table
from treering.engine.batch.step_inputs import CommittedTokens, DraftTrees
from treering.engine.kv_cache import count_common
from treering.engine.protocol import Request, Rollout, RolloutKey
from treering.types import TokenIds

Chains = Mapping[int, TokenIds]
"""Rehearsed tokens that a pass draws again, by row."""


class Redrawn(NamedTuple):
    """Counts of tokens drawn again by a pass, with the field names of `EngineStats`."""

    num_verified: int
    num_kept: int
    num_changed: int


class Rehearsals:
    """Rehearsals of an engine's rows.

    Requests of `add` run only in free rows and free memory, and `drop` takes these back. The rehearsed tokens of a
    submitted request are in `chains` until one changes.
    """

    def __init__(self, table: Table, *, vocab_size: int) -> None:
        """Start without rehearsals."""
        self._table, self._vocab_size = table, vocab_size
        self._waiting: deque[Request] = deque()
        self._running: list[RolloutKey] = []
        self._sampled: dict[RolloutKey, TokenIds] = {}
        self._unchanged: dict[RolloutKey, TokenIds] = {}

    @property
    def keys(self) -> set[RolloutKey]:
        """Keys of waiting and running rehearsals."""
        return {request.key for request in self._waiting}.union(self._running)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests to be sampled early, in order."""
        for request in requests:
            self._table.register(request)
        self._waiting.extend(requests)

    def start(self) -> None:
        """Give waiting rehearsals the free rows and memory."""
        table = self._table
        while self._waiting and table.num_rows < table.max_rows:
            request = self._waiting[0]
            needed = request.prompt.size + request.sampling.max_tokens
            if needed > table.prefixes.allocator.num_free or not table.add(request):
                return
            self._running.append(request.key)
            self._waiting.popleft()

    def drop(self) -> bool:
        """End the rehearsal that started last and keep its tokens; return whether there was one."""
        if not self._running:
            return False
        self._end(self._running[-1])
        return True

    def withdraw(self, keys: set[RolloutKey]) -> None:
        """End the rehearsals of these keys and keep their tokens."""
        for key in [key for key in self._running if key in keys]:
            self._end(key)
        for request in [request for request in self._waiting if request.key in keys]:
            self._waiting.remove(request)
            self._unregister(request)

    def take(self) -> dict[RolloutKey, TokenIds]:
        """End all rehearsals; return the tokens of each sampled since the previous call."""
        self.withdraw(self.keys)
        sampled, self._sampled = self._sampled, {}
        return sampled

    def note_ended(self, rollout: Rollout) -> bool:
        """Take the rollout of an ended row if it was a rehearsal; return whether it was."""
        if rollout.key not in self._running:
            return False
        self._running.remove(rollout.key)
        self._sampled[rollout.key] = rollout.tokens
        return True

    def is_early(self) -> BoolArray:
        """Return which rows rehearse, bool [B]."""
        found = np.zeros(self._table.num_rows, bool)
        if self._running:
            found[self._table.rows_of(set(self._running))] = True
        return found

    def expect(self, request: Request) -> None:
        """Take a submitted request's rehearsed tokens, unless the rollout it continues begins differently."""
        tokens, so_far = request.rehearsed, request.so_far
        if tokens is None or (so_far is not None and count_common(so_far.tokens, tokens) < so_far.num_tokens):
            return
        self._unchanged[request.key] = tokens

    def forget(self, request: Request) -> None:
        """Drop the rehearsed tokens of a request that ended."""
        self._unchanged.pop(request.key, None)

    def chains(self, max_tokens: int) -> dict[int, TokenIds]:
        """Return the rehearsed tokens of decoding rows to draw again in the next pass, at most `max_tokens` in all.

        They end before a stop token, which is drawn after its predecessor, and before a token outside the vocabulary.
        """
        c, found = self._table.columns, {}
        for row, request in enumerate(self._table.requests if self._unchanged else ()):
            tokens = self._unchanged.get(request.key)
            if tokens is None or not c.is_ready[row] or c.num_tokens[row] - c.num_computed[row] != 1:
                continue
            at = int(c.num_tokens[row] - c.num_prompt[row])
            most = max(0, min(max_tokens, int(c.limit[row] - c.num_tokens[row]) - 1))
            chain = tokens[at : at + most]
            ends = (chain < 0) | (chain >= self._vocab_size) | np.isin(chain, request.sampling.stop_tokens)
            chain = chain[: int(ends.argmax())] if ends.any() else chain
            if chain.size > 0:
                found[row] = chain
                max_tokens -= chain.size
        return found

    def note_pass(self, rows: Int64Array, num_before: Int64Array, chains: Chains) -> Redrawn:
        """Compare a pass's tokens with the rehearsed ones; drop the rest of rehearsals that changed.

        Args:
            rows: int64 [R], the sampled rows.
            num_before: int64 [R], context lengths before the pass.
            chains: the rehearsed tokens that the pass drew again.
        """
        c, num_kept, num_changed = self._table.columns, 0, 0
        for row, before in zip(rows.tolist(), num_before.tolist(), strict=True) if self._unchanged else ():
            key, at = self._table.requests[row].key, before - int(c.num_prompt[row])
            rest = self._unchanged.get(key, c.tokens[row, :0])[at:]
            drawn = c.tokens[row, before : c.num_tokens[row]]
            num_equal = count_common(drawn, rest)
            num_kept += min(num_equal, chains[row].size) if row in chains else 0
            if num_equal < min(drawn.size, rest.size):
                num_changed += 1
            if num_equal < drawn.size or num_equal == rest.size:
                self._unchanged.pop(key, None)
        return Redrawn(sum(chain.size for chain in chains.values()), num_kept, num_changed)

    def _end(self, key: RolloutKey) -> None:
        (row,) = self._table.rows_of({key})
        self._sampled[key] = self._table.rollout(row, "abort").tokens
        self._running.remove(key)
        self._unregister(self._table.remove(row))

    def _unregister(self, request: Request) -> None:
        self._table.prefixes.unregister(self._table.keys.of(request))


def with_chains(drafts: DraftTrees, chains: Chains) -> DraftTrees:
    """Return the drafts with the rehearsed chains in place of their rows' drafts.

    Example: drafts [7] and [8] with the chain [4, 5] in row 1 become [7] and [4, 5], with depths 1, 1 and 2.
    """
    rows: list[tuple[NDArray[Any], ...]] = []
    for row, (first, last) in enumerate(zip(drafts.offsets[:-1], drafts.offsets[1:], strict=True)):
        if row in chains:
            order = np.arange(chains[row].size)
            rows.append((chains[row], order - 1, order + 1, np.zeros_like(order), order))
        else:
            rows.append(tuple(column[first:last] for column in (drafts.tokens, *drafts[2:])))
    tokens, parents, *columns = (np.concatenate(column) for column in zip(*rows, strict=True))
    offsets = np.cumsum([0, *(row[0].size for row in rows)])
    return DraftTrees(tokens.astype(np.int32), offsets, parents.astype(np.int32), *columns)


def without_rows(committed: CommittedTokens, hidden: BoolArray) -> CommittedTokens:
    """Return the committed tokens without acceptance in `hidden` rows, bool [B]: their drafts are not the drafter's."""
    return committed._replace(
        num_accepted=np.where(hidden, 0, committed.num_accepted), leaves=np.where(hidden, -1, committed.leaves)
    )
