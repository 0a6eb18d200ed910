"""Expected final lengths of running rollouts, from their current lengths and the group's finished rollouts."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

PRIOR_ROLLOUTS = 2.0
"""Weight of the prediction, in finished siblings."""


def expected_lengths(
    running: ArrayLike,
    finished: ArrayLike,
    *,
    predicted: float,
    ratios: ArrayLike,
    max_tokens: int,
) -> NDArray[np.float64]:
    """Expected lengths of a group's running rollouts, given that each is longer than it is now.

    A survival estimate (Kaplan and Meier's): finished siblings are observed lengths, running ones are censored at their
    current lengths, and the prediction times ratios from history adds lengths of a smaller weight. A rollout's
    expectation is the mean of the lengths above its current one. If there are none, or if the longest rollout is still
    running, it is twice the current length.

    Args:
        running: [U] >= 0: current tokens of the running rollouts.
        finished: [F] >= 1: lengths of the finished rollouts.
        predicted: the group's predicted length, above 0.
        ratios: [H] > 0, one or more: actual over predicted lengths of earlier rollouts, of any prompts.
        max_tokens: limit of every rollout.

    Returns:
        float64 [U], each above the current length, unless that is `max_tokens`.

    >>> expected_lengths([50, 200], [100], predicted=100.0, ratios=[1.0, 3.0], max_tokens=1000).tolist()
    [200.0, 300.0]
    """
    so_far, ended = np.asarray(running, np.float64), np.asarray(finished, np.float64)
    known = np.asarray(ratios, np.float64)
    seen = np.concatenate([ended, np.clip(predicted * known, 1.0, max_tokens)])
    weights = np.concatenate([np.ones(ended.size), np.full(known.size, PRIOR_ROLLOUTS / known.size)])
    lengths, shares, rest = _survival(seen, weights, so_far)
    # Expected length of those that outlive all seen lengths: the same for each, since they are the longest.
    longest = max(float(lengths[-1]), float(so_far.max(initial=0.0)))
    lengths, shares = np.append(lengths, min(2.0 * longest, max_tokens)), np.append(shares, rest)
    beyond = (lengths > so_far[:, None]) * shares
    total = beyond.sum(axis=1)
    doubled = np.minimum(2.0 * np.maximum(so_far, 1.0), max_tokens)
    means = beyond @ lengths / np.where(total > 0, total, 1.0)
    return np.where(total > 0, means, doubled)


def _survival(
    seen: NDArray[np.float64], weights: NDArray[np.float64], so_far: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Sorted lengths, the share of rollouts that ends at each, and the share beyond all."""
    lengths, places = np.unique(seen, return_inverse=True)
    ending = np.bincount(places, weights=weights)
    at_risk = np.cumsum(ending[::-1])[::-1] + (so_far[:, None] >= lengths).sum(axis=0)
    going_on = np.cumprod(1.0 - ending / at_risk)
    before = np.concatenate([[1.0], going_on[:-1]])
    return lengths, before - going_on, float(going_on[-1])
