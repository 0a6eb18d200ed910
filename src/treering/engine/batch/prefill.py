"""Pieces of shared prompts that a pass computes, and how they join the tokens of the running rows.

Knows prefixes and token counts. Knows nothing of rollouts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from treering.engine.batch.state import StepInputs
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.kv_cache.prefix_cache import Prefix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Tokens `first` to `first + num_tokens - 1` of a prefix."""

    prefix: Prefix
    first: int
    num_tokens: int

    def complete(self) -> None:
        """Notes that its keys and values are in the arena, or will be before anything reads them."""
        assert self.prefix.start is not None
        self.prefix.spans.set_computed(self.prefix.start, self.first + self.num_tokens)


def plan_chunks(prefixes: Iterable[Prefix], max_tokens: int) -> list[Chunk]:
    """The first tokens that are missing, prefix by prefix, `max_tokens` in all; they count as computed from now on.

    A pass writes all keys before any token reads, so a prefix goes on in the same pass behind what it shares with one
    before it.

    Example: prefixes that lack 300 and 500 tokens and max_tokens=512 give chunks of 300 and 212.
    """
    chunks = []
    for prefix in prefixes:
        num_tokens = min(prefix.num_tokens - prefix.num_computed, max_tokens)
        if num_tokens > 0:
            chunk = Chunk(prefix=prefix, first=prefix.num_computed, num_tokens=num_tokens)
            chunk.complete()
            chunks.append(chunk)
            max_tokens -= num_tokens
    return chunks


def join(work: StepInputs, chunks: Sequence[Chunk]) -> TokenBatch:
    """One batch: the rows' tokens, then the chunks', whose logits nobody wants."""
    columns = [list(work[:9]), *(_columns(chunk) for chunk in chunks)]
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
        wanted=work.wanted,
    )


def _columns(chunk: Chunk) -> list[np.ndarray]:
    """A chunk's columns in the order of `StepInputs`; to its own tokens, a prefix is the own span."""
    prefix = chunk.prefix
    assert prefix.start is not None
    positions = np.arange(chunk.first, chunk.first + chunk.num_tokens)
    nothing = np.zeros(chunk.num_tokens, np.int64)
    tokens = prefix.tokens[positions].astype(np.int64)
    own_start = nothing + prefix.start
    return [tokens, positions, own_start + positions, nothing, nothing, own_start, positions + 1, nothing, nothing]
