"""Measures the quality of predicted lengths: errors, rank correlation, and moves between rank groups.

R rollouts, N rank groups of equal size, shortest first
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.errors import InputError

LAST_SHARE = 0.1
"""Share of a group, its longest rollouts, that the paper calls the last to finish."""
REACH = 1.1
"""A rollout among the last to finish migrates if it exceeds this times the longest earlier one of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Predicted lengths compared with the actual ones.

    Example: predictions [100, 200] of rollouts with 200 and 400 tokens have a bias of log 2 = 0.693, a sigma of 0, a
    Spearman correlation of 1 and a coverage of 0.
    """

    num_rollouts: int
    """R."""
    sigma: float
    """Standard deviation of log(actual / predicted)."""
    bias: float
    """Mean of log(actual / predicted); above 0 where rollouts are longer than predicted."""
    spearman: float
    """Correlation of the ranks, ties at their mean rank; 0 if all predicted or all actual lengths are equal."""
    coverage: float
    """Share of rollouts no longer than predicted; a good predictor of the quantile q has coverage q."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankGroups:
    """Predicted and actual rank groups of rollouts; see `rank_groups`.

    The first four shares sum to 1: as RhymeRL counts them, only a move to a longer group is an error.

    Example: lengths 1, 2, 3, 4 with predictions 1, 3, 2, 4, in two groups of two. The third rollout was predicted in
    the short group and belongs to the long one. It is the longest of its predicted group, and exceeds 1.1 times the
    largest prediction there, so `accurate` is 0.75 and `migrated` 0.25.
    """

    num_groups: int
    """N."""
    accurate: float
    """Share in their predicted group, or in a shorter one."""
    not_last: float
    """Share in a longer group, and not among the last tenth of the predicted one to finish."""
    within_reach: float
    """Share in a longer group, among that last tenth, at most 1.1 times the longest earlier rollout of the group."""
    migrated: float
    """Share of the rest, which the paper moves to another worker."""
    crossed_boundary: float
    """Share one group higher than predicted and in the shorter half of it; not part of the sum."""
    matrix: NDArray[np.float64]
    """float64 [N, N]: of the rollouts predicted in group i, the share in group j; 0 if there are none."""


def calibrate(predicted: ArrayLike, actual: ArrayLike) -> Calibration:
    """Measures R predictions.

    Args:
        predicted: [R] > 0.
        actual: [R] > 0.

    Raises:
        InputError: no numbers, different counts, or a length that is not above 0.

    >>> calibrate([100.0, 200.0], [200, 400])
    Calibration(num_rollouts=2, sigma=0.0, bias=0.6931471805599453, spearman=1.0, coverage=0.0)
    """
    guesses, lengths = _pairs(predicted, actual)
    errors = np.log(lengths / guesses)
    return Calibration(
        num_rollouts=lengths.size,
        sigma=float(errors.std()),
        bias=float(errors.mean()),
        spearman=_correlation(mean_ranks(guesses), mean_ranks(lengths)),
        coverage=float((lengths <= guesses).mean()),
    )


def group_ranks(
    predicted: ArrayLike, actual: ArrayLike, *, num_groups: int = 8, longest_before: ArrayLike | None = None
) -> RankGroups:
    """Compares the predicted rank groups of R rollouts with the actual ones.

    Args:
        predicted: [R] > 0.
        actual: [R] > 0.
        num_groups: N.
        longest_before: [R] > 0: the longest rollout of the same prompt in the previous epoch; None uses the prediction,
            which counts more rollouts as migrated.

    Raises:
        InputError: no numbers, different counts, a length that is not above 0, or no group.

    >>> group_ranks([1.0, 3.0, 2.0, 4.0], [1, 2, 3, 4], num_groups=2).matrix.tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    guesses, lengths = _pairs(predicted, actual)
    before = guesses if longest_before is None else _pairs(longest_before, actual)[0]
    planned, real = rank_groups(guesses, num_groups), rank_groups(lengths, num_groups)
    longer, last = real > planned, _last_to_finish(planned, lengths)
    reach = np.zeros(num_groups)
    np.maximum.at(reach, planned, before)
    beyond = lengths > REACH * reach[planned]
    half = rank_groups(lengths, 2 * num_groups)
    return RankGroups(
        num_groups=num_groups,
        accurate=float((~longer).mean()),
        not_last=float((longer & ~last).mean()),
        within_reach=float((longer & last & ~beyond).mean()),
        migrated=float((longer & last & beyond).mean()),
        crossed_boundary=float(((real == planned + 1) & (half == 2 * real)).mean()),
        matrix=_shares(planned, real, num_groups),
    )


def rank_groups(values: ArrayLike, num_groups: int) -> NDArray[np.int64]:
    """int64 [R]: the group of each value, from 0, when R values are ranked and cut into N groups of equal size.

    Equal values, such as predictions for one prompt, share a group: that of their mean rank.

    >>> rank_groups([30, 10, 20, 40], 2).tolist()
    [1, 0, 0, 1]
    >>> rank_groups([5, 5, 5, 7], 2).tolist()
    [0, 0, 0, 1]
    """
    if num_groups < 1:
        raise InputError(f"values are cut into at least one group, got {num_groups}; raise it")
    ranks = mean_ranks(values)
    return np.floor(ranks * num_groups / ranks.size).astype(np.int64)


def mean_ranks(values: ArrayLike) -> NDArray[np.float64]:
    """float64 [R]: rank of each value, the smallest 0.5 and the largest R - 0.5; equal values have their mean rank.

    >>> mean_ranks([3, 1, 3, 8]).tolist()
    [2.0, 0.5, 2.0, 3.5]
    """
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - counts / 2
    ranks: NDArray[np.float64] = middles[inverse.reshape(-1)]
    return ranks


def _pairs(predicted: ArrayLike, actual: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    guesses, lengths = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if guesses.ndim != 1 or guesses.shape != lengths.shape or guesses.size == 0:
        raise InputError(
            f"every rollout has a predicted and an actual length, got {guesses.shape} and {lengths.shape}; align them"
        )
    if not (np.isfinite(guesses) & (guesses > 0) & np.isfinite(lengths) & (lengths > 0)).all():
        raise InputError("lengths must be finite and above 0; leave empty rollouts out")
    return guesses, lengths


def _correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / scale if scale else 0.0


def _last_to_finish(groups: NDArray[np.int64], lengths: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Bool [R]: whether a rollout is one of the longest tenth of its group, rounded up, so at least the longest."""
    order = np.lexsort((lengths, groups))
    counts = np.bincount(groups)
    ends = np.cumsum(counts)
    place_from_end = ends[groups[order]] - 1 - np.arange(groups.size)
    last = np.empty(groups.size, bool)
    last[order] = place_from_end < np.ceil(LAST_SHARE * counts)[groups[order]]
    return last


def _shares(planned: NDArray[np.int64], real: NDArray[np.int64], num_groups: int) -> NDArray[np.float64]:
    counts = np.bincount(planned * num_groups + real, minlength=num_groups**2).reshape(num_groups, num_groups)
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares
