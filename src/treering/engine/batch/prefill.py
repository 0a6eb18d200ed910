"""Chunked prefill of shared prompts, joined with the running rows' tokens into one batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import PER_TOKEN, TokenBatch
from treering.engine.kv_cache.prefix_cache import Prefix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillChunk:
    """Tokens `first` to `first + num_tokens - 1` of a prefix."""

    prefix: Prefix
    first: int
    num_tokens: int

    def complete(self) -> None:
        """Marks its keys and values as computed; they are in the arena before anything reads them."""
        assert self.prefix.start is not None
        self.prefix.allocator.set_computed(self.prefix.start, self.first + self.num_tokens)


def plan_chunks(prefixes: Iterable[Prefix], max_tokens: int) -> list[PrefillChunk]:
    """Chunks of the missing prefix tokens, `max_tokens` in all; marks them as computed.

    A pass writes all keys before any token reads, so a prefix can continue in the same pass after the tokens that it
    shares with an earlier one.

    Example: prefixes with 300 and 500 missing tokens and max_tokens=512 give chunks of 300 and 212.
    """
    chunks = []
    for prefix in prefixes:
        num_tokens = min(prefix.num_tokens - prefix.num_computed, max_tokens)
        if num_tokens > 0:
            chunk = PrefillChunk(prefix=prefix, first=prefix.num_computed, num_tokens=num_tokens)
            chunk.complete()
            chunks.append(chunk)
            max_tokens -= num_tokens
    return chunks


def join(batch: TokenBatch, chunks: Sequence[PrefillChunk]) -> TokenBatch:
    """One batch: the rows' tokens, then the chunks', whose logits are not computed."""
    if not chunks:
        return batch
    parts = zip(*(_columns(chunk) for chunk in chunks), strict=True)
    merged: dict[str, Any] = {
        name: np.concatenate([getattr(batch, name), *part]) for name, part in zip(PER_TOKEN, parts, strict=True)
    }
    return replace(batch, **merged)


def _columns(chunk: PrefillChunk) -> list[Int64Array]:
    """A chunk's columns in the order of `PER_TOKEN`; the prefix's span is the own span of its tokens."""
    prefix = chunk.prefix
    assert prefix.start is not None
    positions = np.arange(chunk.first, chunk.first + chunk.num_tokens)
    zeros = np.zeros(chunk.num_tokens, np.int64)
    # Pictures are negative: their features replace whatever is embedded there.
    tokens = np.maximum(prefix.tokens[positions].astype(np.int64), 0)
    own_start = zeros + prefix.start
    return [tokens, positions, own_start + positions, zeros, zeros, own_start, positions + 1, zeros, zeros]
