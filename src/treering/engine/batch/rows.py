"""Hold the running rows: arrays with one entry per row, and the table that maps requests to rows.

Rows 0 to B - 1 are running; the last row replaces a removed one, so there are no gaps.

    M max rows   B running rows   L longest context   Q stop tokens
"""

import math
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.engine.kv_cache import (
    ComputedTokens,
    Copy,
    KVAllocator,
    Prefix,
    PrefixCache,
    PromptKeys,
    RolloutCache,
    Source,
    list_copies,
)
from treering.engine.protocol import FinishReason, Request, Rollout, RolloutKey, TopLogprobs
from treering.engine.sampling.noise import row_key
from treering.engine.stop_strings import Decode, first_stop, turn_start
from treering.types import TokenIds


class BatchState(NamedTuple):
    """State of every row, int64 [M] unless noted."""

    tokens: Int32Array  # [M, L] the context: prompt, then rollout
    logprobs: Float64Array  # [M, L] of the rollout's tokens, from column 0
    policy_logprobs: Float64Array  # [M, L]
    versions: Int32Array  # [M, L]
    was_sampled: BoolArray  # [M, L]
    num_tokens: Int64Array  # current length of the context
    num_prompt: Int64Array
    limit: Int64Array  # longest context
    num_computed: Int64Array  # context tokens whose keys and values are in the arena
    num_prefix: Int64Array  # of these, those in the shared span
    prefix_start: Int64Array
    own_start: Int64Array
    is_ready: BoolArray  # whether the shared span is computed
    keys: Int64Array  # of the noise
    groups: Int64Array  # equal for siblings
    row_ids: Int64Array  # unique id of the rollout, never reused
    temperature: Float64Array
    top_k: Int64Array  # 0 is all
    top_p: Float64Array
    log_min_p: Float64Array  # -inf is all
    penalty: Float64Array  # of repeated tokens; 1 is none
    first_end: Int64Array  # position of the first token that may be a stop
    num_top: Int64Array  # likeliest tokens to record
    stop_tokens: Int32Array  # [M, Q], padded with -1


def make_columns(*, max_rows: int, max_context: int, max_stops: int) -> BatchState:
    """Return columns of zeros."""
    wide = (max_rows, max_context)
    whole = [np.zeros(max_rows, np.int64) for _ in range(12)]
    return BatchState(
        tokens=np.zeros(wide, np.int32),
        logprobs=np.zeros(wide),
        policy_logprobs=np.zeros(wide),
        versions=np.zeros(wide, np.int32),
        was_sampled=np.zeros(wide, bool),
        num_tokens=whole[0],
        num_prompt=whole[1],
        limit=whole[2],
        num_computed=whole[3],
        num_prefix=whole[4],
        prefix_start=whole[5],
        own_start=whole[6],
        is_ready=np.zeros(max_rows, bool),
        keys=whole[7],
        groups=whole[8],
        row_ids=whole[9],
        temperature=np.ones(max_rows),
        top_k=np.zeros(max_rows, np.int64),
        top_p=np.ones(max_rows),
        log_min_p=np.full(max_rows, -np.inf),
        penalty=np.ones(max_rows),
        first_end=whole[10],
        num_top=whole[11],
        stop_tokens=np.full((max_rows, max_stops), -1, np.int32),
    )


def widen(columns: BatchState, *, max_context: int, max_stops: int) -> BatchState:
    """Copy the rows into wider columns, for longer contexts or more stop tokens."""
    wider = make_columns(max_rows=columns.num_tokens.size, max_context=max_context, max_stops=max_stops)
    pairs: Iterator[tuple[NDArray[Any], NDArray[Any]]] = zip(columns, wider, strict=True)
    for old, new in pairs:
        new[tuple(slice(size) for size in old.shape)] = old
    return wider


def move_row(columns: BatchState, source: int, target: int) -> None:
    """Copy a row over another one."""
    num_tokens = columns.num_tokens[source]
    for column in columns:
        if column.ndim == 2 and column is not columns.stop_tokens:
            column[target, :num_tokens] = column[source, :num_tokens]
        else:
            column[target] = column[source]


Move = Callable[[Int64Array, Int64Array], None]
"""Signature of `Decoder.move`."""

_FIRST_CONTEXT = 256
_FIRST_STOPS = 4


class Table:
    """Running requests and their rows 0 to num_rows - 1; waiting requests are not in the table."""

    def __init__(self, *, max_rows: int, allocator: KVAllocator, seed: int, move: Move) -> None:
        """Start without rows; all slots of `allocator` must be free.

        `move` copies keys and values that a new row can reuse.
        """
        self.columns = make_columns(max_rows=max_rows, max_context=_FIRST_CONTEXT, max_stops=_FIRST_STOPS)
        self.requests: list[Request] = []
        self.keys = PromptKeys()
        self.prefixes = PrefixCache(allocator)
        self.rollouts = RolloutCache(allocator)
        self._move = move
        self.keeps_rollouts = False
        """Whether finished rollouts keep their keys and values."""
        self.max_rows, self._seed = max_rows, seed
        self._row_prefixes: list[Prefix] = []
        self._tops: dict[RolloutKey, list[TopLogprobs]] = {}
        self._num_groups = 0
        self._num_added = 0
        self.num_changes = 0
        """Number of rows added and removed so far; the columns' arrays and the row order change only with it."""

    @property
    def num_rows(self) -> int:
        """Number of running rows, B."""
        return len(self.requests)

    def register(self, request: Request) -> None:
        """Register a submitted request, which may share its prompt with others.

        The table keeps the keys and values of finished rollouts once a request continues a rollout or is a call of an
        episode. An engine of single turns never reads them, and keeping them would slow down small models: rows would
        wander through the arena instead of staying in the processor's cache.
        """
        self.keeps_rollouts |= request.so_far is not None or request.call is not None
        self.prefixes.register(self.keys.of(request), request.images)

    def add(self, request: Request) -> bool:
        """Give a registered request a row and key-value slots; return False if there is no space yet."""
        if self.num_rows == self.max_rows:
            return False
        prefix = self.prefixes.get(self.keys.of(request))
        # Keep `evict_idle` from evicting the prefix while its own row is placed.
        prefix.num_running += 1
        # Evict the spans that this request will copy from last.
        for copy in [*self._prefix_copies(prefix), *self._own_copies(request, prefix)]:
            self.rollouts.note_use(copy.span)
            self.prefixes.allocator.note_use(copy.span)
        own_start = self._allocate_spans(prefix, request.sampling.max_tokens)
        if own_start is None:
            prefix.num_running -= 1
            return False
        try:
            self._fill_row(self.num_rows, request, prefix, own_start)
            self._copy_known(self.num_rows, request, prefix)
        except BaseException:
            # Restore the state, so that the request can be tried again.
            self.prefixes.allocator.free(own_start)
            prefix.num_running -= 1
            raise
        self.requests.append(request)
        self._row_prefixes.append(prefix)
        self.num_changes += 1
        return True

    def copy_awaited(self) -> None:
        """Copy the tokens that prefixes have waited for, as far as the last pass computed them."""
        waiting = [prefix for prefix in self.prefixes.incomplete() if prefix.awaited is not None]
        for prefix in waiting:
            self._fill_prefix(prefix, self._copies(prefix.tokens, prefix.num_computed))
        if waiting:
            self.mark_ready()

    def has_missing(self) -> bool:
        """Return whether a running row has more than its last token to compute."""
        c, rows = self.columns, slice(self.num_rows)
        return bool((c.num_tokens[rows] - c.num_computed[rows] > 1).any())

    def typical_context(self) -> int:
        """Return the mean context length of the running rollouts at half of their limit; 256 if none is running."""
        c, num_rows = self.columns, self.num_rows
        if num_rows == 0:
            return _FIRST_CONTEXT
        return int((c.num_prompt[:num_rows] + c.limit[:num_rows]).mean()) // 2

    def progress(self) -> dict[RolloutKey, int]:
        """Return the number of tokens after the prompt of each row, by key."""
        columns = self.columns
        return {
            request.key: int(columns.num_tokens[row] - columns.num_prompt[row])
            for row, request in enumerate(self.requests)
        }

    def rollout(self, row: int, reason: FinishReason) -> Rollout:
        """Return a row's tokens so far as a rollout."""
        columns = self.columns
        first, last = columns.num_prompt[row], columns.num_tokens[row]
        own = slice(0, last - first)
        tops = self._tops.get(self.requests[row].key)
        return replace(
            self.requests[row].unstarted(),
            top=None if tops is None else TopLogprobs(*(np.concatenate(each)[own] for each in zip(*tops, strict=True))),
            tokens=columns.tokens[row, first:last].copy(),
            logprobs=columns.logprobs[row, own].copy(),
            policy_logprobs=columns.policy_logprobs[row, own].copy(),
            loss_mask=columns.was_sampled[row, own].copy(),
            versions=columns.versions[row, own].copy(),
            finish_reason=reason,
            reward=None,
        )

    def note_top(self, row: int, top: TopLogprobs, num_new: int) -> None:
        """Record the likeliest tokens at a row's last `num_new` tokens, which are the first ones of `top`."""
        self._tops.setdefault(self.requests[row].key, []).append(
            TopLogprobs(top.tokens[:num_new], top.logprobs[:num_new])
        )

    def truncate_at_stop(self, row: int, num_new: int, decode: Decode) -> bool:
        """Return whether one of a row's last `num_new` tokens completes a stop string; drop the tokens after it."""
        columns, request = self.columns, self.requests[row]
        strings = request.sampling.stop_strings
        num_new = min(num_new, int(columns.num_tokens[row] - columns.first_end[row]))
        if not strings or num_new <= 0:
            return False
        begin = turn_start(request.so_far)
        num_before = 0 if request.so_far is None else request.so_far.num_tokens - begin
        turn = columns.tokens[row, columns.num_prompt[row] + begin : columns.num_tokens[row]]
        stays = first_stop(turn, num_new, strings, decode, num_before)
        if stays is not None:
            columns.num_tokens[row] -= num_new - stays
        return stays is not None

    def remove(self, row: int) -> Request:
        """Free a row and its memory, which may stay cached; the last row replaces it."""
        request, prefix, computed = self.requests[row], self._row_prefixes[row], self._computed_tokens(row)
        if self.keeps_rollouts and computed.tokens.size > 0:
            self.rollouts.keep(self.keys.of(request), computed)
        else:
            self.prefixes.allocator.free(computed.start)
        prefix.num_running -= 1
        self._tops.pop(request.key, None)
        last = self.num_rows - 1
        if row != last:
            move_row(self.columns, last, row)
            self.requests[row], self._row_prefixes[row] = self.requests[last], self._row_prefixes[last]
        self.requests.pop()
        self._row_prefixes.pop()
        self.num_changes += 1
        return request

    def invalidate(self) -> None:
        """Mark all keys and values as not computed: rows prefill their tokens again before they continue."""
        self.prefixes.invalidate()
        self.rollouts.clear()
        self.columns.num_computed[: self.num_rows] = self.columns.num_prefix[: self.num_rows]
        self.mark_ready()

    def mark_ready(self) -> None:
        """Mark the rows whose prefix is complete as ready to run."""
        for row, prefix in enumerate(self._row_prefixes):
            self.columns.is_ready[row] = prefix.is_complete

    def rows_of(self, keys: Set[RolloutKey]) -> list[int]:
        """Return the rows of these requests, last one first, so that removing one does not move the next ones."""
        return [row for row in reversed(range(self.num_rows)) if self.requests[row].key in keys]

    def _allocate_spans(self, prefix: Prefix, num_own: int) -> int | None:
        """Allocate the prefix's span and the row's own span; evict finished rollouts and idle prefixes for them."""
        start = self._try_allocate(prefix, num_own)
        while start is None and self.rollouts.evict():
            start = self._try_allocate(prefix, num_own)
        if start is None and self.prefixes.evict_idle():
            start = self._try_allocate(prefix, num_own)
        if start is None and self.num_rows == 0:
            # No row is running, so only cached prompts, or the prefix itself in the middle of the arena, can block it.
            self.prefixes.free_span(prefix)
            self.prefixes.invalidate()
            start = self._try_allocate(prefix, num_own)
        return start

    def _try_allocate(self, prefix: Prefix, num_own: int) -> int | None:
        return self.prefixes.allocator.allocate(num_own) if self.prefixes.allocate(prefix) else None

    def _copy_known(self, row: int, request: Request, prefix: Prefix) -> None:
        """Copy the keys and values of a new row that are already computed elsewhere."""
        c = self.columns
        self._fill_prefix(prefix, self._prefix_copies(prefix))
        c.is_ready[row] = prefix.is_complete
        for copy in self._own_copies(request, prefix):
            self._copy(copy, int(c.own_start[row]) - prefix.num_tokens)
            c.num_computed[row] += copy.num_tokens

    def _fill_prefix(self, prefix: Prefix, copies: Iterable[Copy]) -> None:
        for copy in copies:
            assert prefix.start is not None
            self._copy(copy, prefix.start)
            self.prefixes.allocator.set_computed(prefix.start, copy.first + copy.num_tokens)

    def _prefix_copies(self, prefix: Prefix) -> list[Copy]:
        # The first of several rows that run a prefix has already made the copies.
        return [] if prefix.is_complete or prefix.num_running > 1 else self._copies(prefix.tokens, prefix.num_computed)

    def _own_copies(self, request: Request, prefix: Prefix) -> list[Copy]:
        """Return the copies for a continued rollout's own tokens, except the last, whose logits are needed."""
        if request.so_far is None:
            return []
        context = np.concatenate([prefix.tokens, request.prompt[-1:], request.so_far.tokens])
        return self._copies(context[:-1], prefix.num_tokens)

    def _copies(self, tokens: TokenIds, num_computed: int) -> list[Copy]:
        """Return copies from prompts, turns and branches for a context, after its first `num_computed` tokens."""
        prompts = [Source(prompt, 0, start) for prompt, start in self.prefixes.computed()]
        kept = self.rollouts.spans_within(tokens)
        running = (
            (other.tokens, self._computed_tokens(row))
            for row, other in enumerate(self._row_prefixes)
            # A cheap check before the whole path is concatenated.
            if other.num_tokens < tokens.size and np.array_equal(other.tokens, tokens[: other.num_tokens])
        )
        own = [
            Source(np.concatenate([before, span.tokens]), before.size, span.start) for before, span in (*kept, *running)
        ]
        return list_copies([*prompts, *own], tokens, num_computed)

    def _copy(self, copy: Copy, start: int) -> None:
        """Copy keys and values into a context whose first token has slot `start`."""
        steps = np.arange(copy.num_tokens)
        self._move(copy.source + steps, start + copy.first + steps)

    def _computed_tokens(self, row: int) -> ComputedTokens:
        """Return the computed tokens of a row's own span, as a view."""
        c = self.columns
        # A stop string may have removed computed tokens.
        end = min(c.num_computed[row], c.num_tokens[row])
        return ComputedTokens(c.tokens[row, c.num_prefix[row] : end], int(c.own_start[row]))

    def _group_of(self, request: Request) -> int:
        for row, other in enumerate(self.requests):
            if (other.prompt_id, other.draw) == (request.prompt_id, request.draw):
                return int(self.columns.groups[row])
        self._num_groups += 1
        return self._num_groups

    def _fill_row(self, row: int, request: Request, prefix: Prefix, own_start: int) -> None:
        sampling, so_far = request.sampling, request.so_far
        num_prompt = request.prompt.size
        num_tokens, num_stops = num_prompt + sampling.max_tokens, len(sampling.stop_tokens)
        context, stops = self.columns.tokens.shape[1], self.columns.stop_tokens.shape[1]
        if num_tokens > context or num_stops > stops:
            context = 2 * num_tokens if num_tokens > context else context
            self.columns = widen(self.columns, max_context=context, max_stops=max(stops, num_stops))
        c = self.columns
        c.num_tokens[row] = c.num_prompt[row] = num_prompt
        c.tokens[row, :num_prompt] = request.prompt
        if so_far is not None:
            _restore(c, row, so_far)
        c.limit[row] = num_prompt + sampling.max_tokens
        c.num_computed[row] = c.num_prefix[row] = prefix.num_tokens
        c.prefix_start[row], c.own_start[row] = prefix.start or 0, own_start
        c.keys[row] = row_key(self._seed, request.prompt_id, request.draw, request.sample, request.call)
        c.groups[row] = self._group_of(request)
        c.row_ids[row] = self._num_added
        self._num_added += 1
        c.temperature[row], c.top_k[row], c.top_p[row] = sampling.temperature, sampling.top_k or 0, sampling.top_p
        c.log_min_p[row] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        c.penalty[row] = sampling.repetition_penalty
        c.first_end[row], c.num_top[row] = num_prompt + sampling.min_tokens, sampling.num_top_logprobs
        c.stop_tokens[row] = -1
        c.stop_tokens[row, : len(sampling.stop_tokens)] = sampling.stop_tokens


def _restore(c: BatchState, row: int, so_far: Rollout) -> None:
    own = slice(0, so_far.num_tokens)
    first = c.num_prompt[row]
    c.tokens[row, first : first + so_far.num_tokens] = so_far.tokens
    c.logprobs[row, own], c.policy_logprobs[row, own] = so_far.logprobs, so_far.policy_logprobs
    c.versions[row, own], c.was_sampled[row, own] = so_far.versions, so_far.loss_mask
    c.num_tokens[row] += so_far.num_tokens
