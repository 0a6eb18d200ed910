"""An append-only text with hash chains: each position links to the previous one that ends in the same tokens.

A search follows a chain from the newest position. Chains may contain overwritten positions, and positions of other
tokens with the same hash. Readers compare the tokens themselves, so a wrong link costs one comparison.

    C entries of the text   H heads of each kind
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array
from treering.compiling.lean import lean
from treering.history.jit import prefetch
from treering.history.store.prompt_index import MARKER, check_entries

LONG = 3
"""Tokens that agree along a long chain; along a short chain it is one."""

EVERYWHERE = 0
"""The scope of links across all scopes; other scopes are greater."""

_LEAST_HEADS = 16
_SALT_SHORT, _SALT_LONG = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


class HashChains(NamedTuple):
    """Takes 16 bytes per entry and 12 for its heads.

    Each kind of link has its own heads: if a common token and three rare ones shared a head, its newest positions would
    all be those of the common token.
    """

    tokens: Int32Array  # [C]
    short: Int32Array  # [C], the previous position with the same token; -1 is none
    long: Int32Array  # [C], the previous position with the same three tokens
    wide: Int32Array  # [C], the same, whatever the scope
    short_heads: Int32Array  # [H], the newest position by hash
    long_heads: Int32Array  # [H]
    wide_heads: Int32Array  # [H]


def make_hash_chains(num_entries: int) -> HashChains:
    """Chains of so many entries, all of them markers.

    Raises:
        InputError: more than `MAX_ENTRIES`.
    """
    check_entries(num_entries, "the text of running rows", "run fewer rows at a time, or lower max_live_tokens")
    num_heads = max(num_entries, _LEAST_HEADS)
    sizes = [num_entries] * 4 + [num_heads] * 3
    # One allocation, which is large enough for huge pages where its parts may not be.
    whole, ends = np.full(sum(sizes), -1, np.int32), accumulate(sizes)
    tokens, *others = (whole[end - size : end] for size, end in zip(sizes, ends, strict=True))
    tokens[:] = MARKER
    return HashChains(tokens, *others)


@lean
def short_head(scope: int, token: int, num_heads: int) -> int:
    """The head of a token in a scope."""
    mixed = (np.uint64(scope) * _SALT_LONG + np.uint64(token + 1)) * _SALT_SHORT
    found: int = _among(mixed ^ (mixed >> np.uint64(29)), num_heads)
    return found


@lean
def long_head(scope: int, first: int, second: int, third: int, num_heads: int) -> int:
    """The head of three tokens in a scope, in the order of the text."""
    mixed = (np.uint64(first + 2) * _SALT_SHORT + np.uint64(second + 3)) * _SALT_LONG + np.uint64(third + 5)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _SALT_SHORT + np.uint64(scope) * _SALT_LONG
    found: int = _among(mixed ^ (mixed >> np.uint64(29)), num_heads)
    return found


@lean
def _among(mixed: np.uint64, num_heads: int) -> int:
    """A number below the number of heads."""
    return int((mixed * _MIX >> np.uint64(32)) * np.uint64(num_heads) >> np.uint64(32))


@lean
def newest_of_token(chains: HashChains, scope: int, token: int) -> int:
    """The newest position of a token in a scope; -1 is none."""
    return int(chains.short_heads[np.uintp(short_head(scope, token, chains.short_heads.size))])


@lean
def newest_of_three(heads: Int32Array, scope: int, context: Int32Array) -> int:
    """The newest position of the last three tokens of a context, by the heads of one kind; -1 is none."""
    size = context.size
    head = long_head(scope, context[size - 3], context[size - 2], context[size - 1], heads.size)
    return int(heads[np.uintp(head)])


@lean
def link(links: Int32Array, heads: Int32Array, head: int, at: int) -> None:
    """Makes a position the newest of its head; no effect if it is already, so that none links to itself."""
    if heads[head] != at:
        links[at] = heads[head]
        heads[head] = at


@lean
def link_begin(chains: HashChains, at: int, scope: int) -> None:
    """Links the marker at the beginning of a text."""
    link(chains.short, chains.short_heads, short_head(scope, MARKER, chains.short_heads.size), at)


@lean
def append(chains: HashChains, at: int, first: int, token: int, scope: int) -> None:
    """Writes a token at a position of a text that began at `first`, links it, and ends the text after it."""
    chains.tokens[at] = token
    chains.tokens[at + 1] = MARKER
    link(chains.short, chains.short_heads, short_head(scope, token, chains.short_heads.size), at)
    if at - first >= LONG - 1:
        earlier, before, num_heads = chains.tokens[at - 2], chains.tokens[at - 1], chains.long_heads.size
        link(chains.long, chains.long_heads, long_head(scope, earlier, before, token, num_heads), at)
        link(chains.wide, chains.wide_heads, long_head(EVERYWHERE, earlier, before, token, num_heads), at)
    else:
        chains.long[at] = chains.wide[at] = -1


@lean
def prefetch_append(chains: HashChains, scope: int, context: Int32Array, i: int) -> None:
    """Prefetches what `append` reads when it writes a context's token `i`, where i >= 2."""
    num_heads = chains.long_heads.size
    earlier, before, token = context[i - 2], context[i - 1], context[i]
    prefetch(chains.short_heads, short_head(scope, token, chains.short_heads.size))
    prefetch(chains.long_heads, long_head(scope, earlier, before, token, num_heads))
    prefetch(chains.wide_heads, long_head(EVERYWHERE, earlier, before, token, num_heads))
