"""Experts that a mixture of experts chose while sampling, as part of a token's identity.

Tokens merge only if they were routed alike: replaying another route would give another gradient.

    F flat tokens   T tokens of a sequence   L layers with experts   k experts per token
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.arrays import Int32Array
from treering.errors import InputError

NO_ROUTE = -1
"""Expert of a token without a recorded route: the model chooses."""
MAX_EXPERTS = int(np.iinfo(np.int16).max)


class RoutedTokens(NamedTuple):
    """Distinct pairs of a token and its route."""

    ids: Int32Array
    """int32 [F]: index of each token's pair."""
    tokens: Int32Array
    """int32 [pairs]."""
    routes: NDArray[np.int16]
    """int16 [pairs, L, k]."""


def as_routes(routes: ArrayLike | None, num_tokens: int, name: str = "routed_experts") -> NDArray[np.int16] | None:
    """Return the routes of one sequence as int16 [T, L, k], the experts of a layer ascending.

    The last token may be left out, because an engine does not compute the last token that it samples. A row of -1 is a
    token without a route.

    Args:
        routes: integers [T, L, k] or [T - 1, L, k]; None for a sequence without routes.
        num_tokens: T.
        name: name for errors.

    Raises:
        InputError: a wrong shape, an entry that is not an expert, or an expert twice in a layer.

    Example:
        >>> as_routes([[[3, 1]], [[0, 2]]], num_tokens=3).tolist()
        [[[1, 3]], [[0, 2]], [[-1, -1]]]
    """
    if routes is None:
        return None
    given = np.asarray(routes)
    if given.ndim != 3 or given.dtype.kind not in "iu" or not num_tokens - 1 <= given.shape[0] <= num_tokens:
        raise InputError(
            f"{name} must be integers [tokens, layers, experts per token] for {num_tokens} tokens, the last of which "
            f"may be left out, got {given.dtype} {list(given.shape)}; give one row per token, of the prompt too"
        )
    if given.size and not NO_ROUTE <= int(given.min()) <= int(given.max()) <= MAX_EXPERTS:
        raise InputError(
            f"{name} must be expert numbers in [0, {MAX_EXPERTS}], or -1 for a token without a route, got "
            f"{int(given.min())} to {int(given.max())}"
        )
    rows = np.full((num_tokens, *given.shape[1:]), NO_ROUTE, np.int16)
    rows[: given.shape[0]] = np.sort(given, axis=-1)
    is_open = rows == NO_ROUTE
    repeated = (rows[..., 1:] == rows[..., :-1]).any((1, 2)) & ~is_open.all((1, 2))
    wrong = np.flatnonzero(repeated | (is_open.any((1, 2)) != is_open.all((1, 2))))
    if wrong.size:
        at = int(wrong[0])
        raise InputError(
            f"{name}[{at}] must name different experts in each layer, or -1 everywhere for a token without a route, "
            f"got {given[at].tolist()!s:.80}"
        )
    return rows


def merge_routes(flat: Int32Array, routes: Sequence[NDArray[np.int16] | None], lengths: Sequence[int]) -> RoutedTokens:
    """Number the distinct pairs of a token and its route over all sequences.

    Args:
        flat: int32 [F], the tokens of all sequences.
        routes: results of `as_routes`, one for each sequence; at least one is not None.
        lengths: number of tokens of each sequence.

    Raises:
        InputError: sequences differ in layers or in experts per token.

    Example:
        >>> routes = [as_routes([[[0]], [[1]]], 2), as_routes([[[0]], [[2]]], 2)]
        >>> merged = merge_routes(np.array([5, 6, 5, 6], np.int32), routes, [2, 2])
        >>> [(int(t), int(r)) for t, r in zip(merged.tokens[merged.ids], merged.routes[merged.ids, 0, 0])]
        [(5, 0), (6, 1), (5, 0), (6, 2)]
    """
    shapes = {one.shape[1:] for one in routes if one is not None}
    if len(shapes) > 1:
        raise InputError(
            f"routed_experts of all sequences must have the same layers and experts per token, got {sorted(shapes)}; "
            "train the rollouts of one model together"
        )
    width = shapes.pop()
    none = [np.full((length, *width), NO_ROUTE, np.int16) for length in lengths]
    rows = np.concatenate([own if own is not None else empty for own, empty in zip(routes, none, strict=True)])
    keys = np.concatenate([flat.view(np.int16).reshape(flat.size, 2), rows.reshape(flat.size, -1)], axis=1)
    first, ids = _distinct_rows(keys)
    return RoutedTokens(ids=ids.astype(np.int32), tokens=flat[first], routes=rows[first])


def _distinct_rows(keys: NDArray[np.int16]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of the first of each distinct row, and the number of each row among the distinct ones."""
    for seed in count():
        # Sorting 64-bit hashes is far faster than sorting rows of hundreds of bytes. A collision is seen and rehashed.
        factors = np.random.default_rng(seed).integers(0, 1 << 63, keys.shape[1], np.uint64) | np.uint64(1)
        hashes = np.zeros(keys.shape[0], np.uint64)
        for column, factor in zip(keys.T, factors, strict=True):
            hashes += column.astype(np.uint64) * factor
        _, first, ids = np.unique(hashes, return_index=True, return_inverse=True)
        if (keys[first[ids]] == keys).all():
            return first, ids
    raise AssertionError
