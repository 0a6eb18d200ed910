"""Chunked prefill of shared prompts, joined with the running rows' tokens into one batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from treering.engine.batch.state import StepInputs
from treering.engine.batch.token_batch import TokenBatch
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


def join(inputs: StepInputs, chunks: Sequence[PrefillChunk]) -> TokenBatch:
    """One batch: the rows' tokens, then the chunks', whose logits are not computed."""
    columns = [list(inputs[:9]), *(_columns(chunk) for chunk in chunks)]
    merged = columns[0] if len(columns) == 1 else [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    tokens, positions, slots, prefix_start, num_prefix, own_start, num_own, tree_start, tree_bits = merged
    return TokenBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        prefix_start=prefix_start,
        num_prefix=num_prefix,
        own_start=own_start,
        num_own=num_own,
        tree_start=tree_start,
        tree_bits=tree_bits,
        wanted=inputs.wanted,
    )


def _columns(chunk: PrefillChunk) -> list[np.ndarray]:
    """A chunk's columns in the order of `StepInputs`; the prefix's span is the own span of its tokens."""
    prefix = chunk.prefix
    assert prefix.start is not None
    positions = np.arange(chunk.first, chunk.first + chunk.num_tokens)
    zeros = np.zeros(chunk.num_tokens, np.int64)
    # Pictures are negative: their features replace whatever is embedded there.
    tokens = np.maximum(prefix.tokens[positions].astype(np.int64), 0)
    own_start = zeros + prefix.start
    return [tokens, positions, own_start + positions, zeros, zeros, own_start, positions + 1, zeros, zeros]
