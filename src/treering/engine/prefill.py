"""Pieces of shared prompts that a pass computes, and how they join the tokens of the running rows.

Knows prefixes and token counts. Knows nothing of rollouts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from treering.engine.decoder import TokenBatch
from treering.engine.prefixes import Prefix
from treering.engine.rows import Work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Tokens `first` to `first + num_tokens - 1` of a prefix."""

    prefix: Prefix
    first: int
    num_tokens: int

    def complete(self) -> None:
        """Notes that its keys and values are in the arena, or will be before anything reads them."""
        self.prefix.num_computed = self.first + self.num_tokens


def plan_chunks(prefixes: Iterable[Prefix], max_tokens: int) -> list[Chunk]:
    """The first tokens that are missing, prefix by prefix, `max_tokens` in all.

    Example: prefixes that lack 300 and 500 tokens and max_tokens=512 give chunks of 300 and 212.
    """
    chunks = []
    for prefix in prefixes:
        num_tokens = min(prefix.num_tokens - prefix.num_computed, max_tokens)
        if num_tokens > 0:
            chunks.append(Chunk(prefix=prefix, first=prefix.num_computed, num_tokens=num_tokens))
            max_tokens -= num_tokens
    return chunks


def join(work: Work, chunks: Sequence[Chunk]) -> TokenBatch:
    """One batch: the rows' tokens, then the chunks', whose logits nobody wants."""
    columns = [list(work[:7]), *(_columns(chunk) for chunk in chunks)]
    merged = columns[0] if len(columns) == 1 else [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    tokens, positions, slots, prefix_start, num_prefix, own_start, num_own = merged
    return TokenBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        prefix_start=prefix_start,
        num_prefix=num_prefix,
        own_start=own_start,
        num_own=num_own,
        wanted=work.wanted,
    )


def _columns(chunk: Chunk) -> list[np.ndarray]:
    """A chunk's columns in the order of `Work`; to its own tokens, a prefix is the own span."""
    prefix = chunk.prefix
    assert prefix.start is not None
    positions = np.arange(chunk.first, chunk.first + chunk.num_tokens)
    nothing = np.zeros(chunk.num_tokens, np.int64)
    tokens = prefix.tokens[positions].astype(np.int64)
    return [tokens, positions, prefix.start + positions, nothing, nothing, nothing + prefix.start, positions + 1]
