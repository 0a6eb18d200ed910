"""Random sequences for forests of every shape: duplicates, strict prefixes, single tokens, deep and wide trees."""

import random

from hypothesis import strategies as st

MAX_TOKEN = 7


def token_lists(max_size: int) -> st.SearchStrategy[list[int]]:
    """Draw one non-empty sequence over a small vocabulary, so that prefixes often coincide."""
    return st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=max_size)


@st.composite
def sequence_sets(
    draw: st.DrawFn, max_sequences: int = 8, max_extra: int = 12, min_sequences: int = 1
) -> list[list[int]]:
    """Draw sequences grown from each other: cut anywhere (a strict prefix), continued, or repeated."""
    sequences = [draw(token_lists(max_extra))]
    for _ in range(draw(st.integers(min_sequences - 1, max_sequences - 1))):
        base = draw(st.sampled_from(sequences))
        kept = draw(st.integers(0, len(base)))
        extra = draw(st.lists(st.integers(0, MAX_TOKEN), max_size=max_extra))
        sequences.append((base[:kept] + extra) or [draw(st.integers(0, MAX_TOKEN))])
    return sequences if min_sequences > 0 or draw(st.booleans()) else []


def comb(depth: int) -> list[list[int]]:
    """Build a spine of single tokens with a leaf at each: branch i has i + 1 spine tokens and its own last one."""
    return [[1] * (i + 1) + [2] for i in range(depth)]


def reversed_comb(depth: int) -> list[list[int]]:
    """Build the same tree with the spine before its leaves, so that visible keys form a long staircase."""
    return list(reversed(comb(depth)))


def star(width: int, prompt: int = 1, response: int = 1) -> list[list[int]]:
    """Build one prompt with `width` responses that differ in their first token."""
    return [[0] * prompt + [1 + i] + [3] * (response - 1) for i in range(width)]


def bushy(num_sequences: int, seed: int = 0) -> list[list[int]]:
    """Build sequences that leave earlier ones anywhere, in runs of 1 to 40 tokens: short and long segments mixed."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(MAX_TOKEN + 1) for _ in range(60)]]
    while len(sequences) < num_sequences:
        base = rng.choice(sequences)
        kept = base[: rng.randrange(1, len(base) + 1)]
        sequences.append(kept + [rng.randrange(MAX_TOKEN + 1) for _ in range(rng.choice([1, 3, 10, 40]))])
    return sequences


SHAPES: dict[str, list[list[int]]] = {
    "single token": [[3]],
    "two single tokens": [[3], [4]],
    "duplicates": [[1, 2, 3], [1, 2, 3], [1, 2, 3]],
    "prefixes of each other": [[1, 2, 3, 4], [1, 2], [1, 2, 3], [1]],
    "long segments": [[5] * 40 + [6] * 50, [5] * 40 + [7] * 35, [5] * 40 + [7] * 35 + [1] * 33],
    "comb": comb(150),
    "reversed comb": reversed_comb(150),
    "star": star(160, prompt=40, response=3),
    "bushy": bushy(40),
    "forest of chains": [[i] * (1 + 7 * i) for i in range(8)],
}
"""Small instances of every shape by name. Tests that can afford large ones build them."""
