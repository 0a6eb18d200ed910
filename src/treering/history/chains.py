"""An append-only text and, for every place, the place before it that ends in the same tokens: a search from the newest.

Knows tokens and scopes. Knows nothing of rows, prompts and drafts. Chains may hold places that have been written over:
whoever follows one compares the tokens themselves, so a stale link costs a look and never more.

    C entries of the text   H heads
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.history.index import MARKER, check_entries
from treering.history.lean import lean
from treering.history.prefetch import prefetch

Int32Array = NDArray[np.int32]

LONG = 3
"""Tokens that a link of the long chain agrees in; of the short one it is one."""

EVERYWHERE = 0
"""The scope of links that stay in none; others are above it."""

_SALT_SHORT, _SALT_LONG = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


class Chains(NamedTuple):
    """16 bytes an entry, and 16 to 32 for its heads."""

    tokens: Int32Array  # [C]
    short: Int32Array  # [C], the place before it with the same token; -1 is none
    long: Int32Array  # [C], the place before it with the same three tokens
    wide: Int32Array  # [C], the same, whatever the scope
    heads: Int32Array  # [H], H a power of two: the newest place by hash
    wide_heads: Int32Array  # [H], the same for the wide ones: so these take nothing from the others


def make_chains(num_entries: int) -> Chains:
    """Room for that many entries, all of them markers.

    Raises:
        InputError: more than places can count.
    """
    check_entries(num_entries, "what is running", "run fewer rows at a time, or lower max_live_tokens")
    num_heads = 1 << max(4, int(2 * num_entries - 1).bit_length())
    return Chains(
        tokens=np.full(num_entries, MARKER, np.int32),
        short=np.full(num_entries, -1, np.int32),
        long=np.full(num_entries, -1, np.int32),
        wide=np.full(num_entries, -1, np.int32),
        heads=np.full(num_heads, -1, np.int32),
        wide_heads=np.full(num_heads, -1, np.int32),
    )


@lean
def short_head(scope: int, token: int, num_heads: int) -> int:
    """Where the newest place of a token in a scope stands in the heads."""
    mixed = (np.uint64(scope) * _SALT_LONG + np.uint64(token + 1)) * _SALT_SHORT
    return int(np.int64((mixed ^ (mixed >> np.uint64(29))) * _MIX >> np.uint64(20)) & (num_heads - 1))


@lean
def long_head(scope: int, first: int, second: int, third: int, num_heads: int) -> int:
    """The same of three tokens, in the order of the text."""
    mixed = (np.uint64(first + 2) * _SALT_SHORT + np.uint64(second + 3)) * _SALT_LONG + np.uint64(third + 5)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _SALT_SHORT + np.uint64(scope) * _SALT_LONG
    return int(np.int64((mixed ^ (mixed >> np.uint64(29))) * _MIX >> np.uint64(20)) & (num_heads - 1))


@lean
def link(links: Int32Array, heads: Int32Array, head: int, at: int) -> None:
    """Puts a place before the newest one; the newest itself stays where it is, and never follows itself."""
    if heads[head] != at:
        links[at] = heads[head]
        heads[head] = at


@lean
def append(chains: Chains, at: int, first: int, token: int, scope: int) -> None:
    """Writes a token at a place whose text began at `first`, links it, and ends the text behind it."""
    chains.tokens[at] = token
    chains.tokens[at + 1] = MARKER
    link(chains.short, chains.heads, short_head(scope, token, chains.heads.size), at)
    if at - first >= LONG - 1:
        earlier, before, num_heads = chains.tokens[at - 2], chains.tokens[at - 1], chains.heads.size
        link(chains.long, chains.heads, long_head(scope, earlier, before, token, num_heads), at)
        link(chains.wide, chains.wide_heads, long_head(EVERYWHERE, earlier, before, token, num_heads), at)
    else:
        chains.long[at] = chains.wide[at] = -1


@lean
def ask_for_heads(chains: Chains, scope: int, context: Int32Array, i: int) -> None:
    """Asks for what `append` will read when it writes a context's token, which two others stand before."""
    num_heads = chains.heads.size
    earlier, before, token = context[i - 2], context[i - 1], context[i]
    prefetch(chains.heads, short_head(scope, token, num_heads))
    prefetch(chains.heads, long_head(scope, earlier, before, token, num_heads))
    prefetch(chains.wide_heads, long_head(EVERYWHERE, earlier, before, token, num_heads))
