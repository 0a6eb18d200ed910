"""Estimates how likely a drafted token is to be accepted, from what was accepted before.

A logistic model over the features of a candidate, and a table of how well its estimates hold. No clock and no chance:
the same calls give the same estimates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.errors import InputError
from treering.history.draft.candidates import SHARES
from treering.history.features import NUM_GENERAL_KINDS, NUM_KINDS, NUM_VOTES, NUM_WEIGHTS, squash
from treering.history.jit import STAMP

NUM_BINS = 20
_RATE = 0.15
"""With 11 general kinds a token that always comes to nothing is left out within 30 rows; 0.1 takes over 60."""
_TOKEN_RATE = 0.4
"""Of weights of single tokens: they are many, and each is seen seldom."""
_VOTE_RATE = 0.02
_FIRST_SQUARES = 4.0
_SCALE_RATE = 0.3
_FIRST_SCALE_SQUARES = 100.0
_MOST_LOGIT = 8.0
_MOST_WEIGHT = 1e6
"""Far beyond any that is learnt; sums of such weights are numbers, also as float32."""
SCALE = NUM_WEIGHTS
OFFSET = SCALE + 1
NUM_TRAINED = OFFSET + 1
_ANY_COUNT = (0, np.iinfo(np.int64).max)
_ANY_SUM = (0, float(np.finfo(np.float64).max))
_LIMITS = {
    "weights": (-_MOST_WEIGHT, _MOST_WEIGHT),
    "squares": (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)),
    "reliability": _ANY_SUM,
    "num_undrafted": _ANY_COUNT,
    "asked": _ANY_SUM,
    "rests": _ANY_COUNT,
}
"""What the arrays of a state hold: the least and the most of each."""


class Acceptance:
    """Weights that follow what is observed, and how often estimates of each size came true.

    Every candidate whose parent was accepted is one observation; a weight moves by the error of the model, the less
    the more it has been moved before (AdaGrad: Duchi et al. 2011, section 1.1). Weights of tokens that were seen a few
    times say more than they know; so a scale and an offset, learnt from how the model's logits hold on tokens that it
    has not learnt from yet, turn a logit into the estimate (Platt 1999, section 2).

    Example: with all weights 0 and a scale of 1 a candidate is estimated at 0.5; accepted once, the weights of its
    general features rise by 0.15 * 0.5 / sqrt(4 + 0.25) = 0.036 each.

    Attributes:
        weights: float32 [votes + features + 2], the last two the scale and the offset.
        squares: float32, aligned: sums of squared gradients.
        reliability: float64 [20, 3]: for estimates from 0 to 1 in steps of 0.05 how many there were, their sum, and how
            many were accepted.
        num_undrafted: int64 [1], rows without a draft since the last one that was only tried.
        asked: float64 [3], see `SourceGate`.
        rests: int64 [2], see `Backoff`.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(NUM_TRAINED, np.float32)
        self.weights[:NUM_VOTES] = SHARES
        self.weights[SCALE] = 1.0
        self.squares = np.full(NUM_TRAINED, _FIRST_SQUARES, np.float32)
        self.squares[SCALE:] = _FIRST_SCALE_SQUARES
        self.reliability = np.zeros((NUM_BINS, 3))
        self.num_undrafted = np.zeros(1, np.int64)
        self.asked = np.zeros(3)
        self.rests = np.zeros(2, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(getattr(self, name).nbytes for name in _LIMITS)

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all arrays."""
        return {name: getattr(self, name).copy() for name in _LIMITS}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Takes what `state` gave.

        Raises:
            InputError: other names, shapes or values; nothing is taken then.
        """
        if state.keys() != _LIMITS.keys():
            raise InputError(f"a drafter's state has {sorted(_LIMITS)}, got {sorted(state)}; pass a state() unchanged")
        taken = {name: np.asarray(values) for name, values in state.items()}
        for name, values in taken.items():
            _check(name, values, getattr(self, name).shape)
        for name, values in taken.items():
            getattr(self, name)[:] = values


def _check(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    least, most = _LIMITS[name]
    is_right = values.dtype.kind in "iuf" and values.shape == shape
    # Written so that what is no number is within nothing.
    if not is_right or not ((values >= least) & (values <= most)).all():
        raise InputError(
            f"{name} of a drafter's state is finite, from {least:g} to {most:g} and of shape {shape}, got shape "
            f"{values.shape} or another value; pass a state() unchanged"
        )


@lean
def estimate(weights: Float32Array, shares: Float32Array, features: Int32Array) -> float:
    """The acceptance of a candidate.

    Args:
        weights: see `Acceptance`.
        shares: float32 [votes], stretched.
        features: int32 [kinds], numbers of the weights.
    """
    return float(squash(weights[SCALE] * _logit(weights, shares, features) + weights[OFFSET]))


@lean
def _logit(weights: Float32Array, shares: Float32Array, features: Int32Array) -> float:
    # Sums side by side, and shares by themselves: one addition need not wait for the one before.
    first = second = third = fourth = fifth = sixth = seventh = voted = shared = np.float32(0.0)
    for k in range(1, NUM_GENERAL_KINDS, 5):
        first += weights[np.uintp(features[k])]
        second += weights[np.uintp(features[k + 1])]
        third += weights[np.uintp(features[k + 2])]
        fourth += weights[np.uintp(features[k + 3])]
        fifth += weights[np.uintp(features[k + 4])]
    for k in range(NUM_GENERAL_KINDS, NUM_KINDS, 2):
        sixth += weights[np.uintp(features[k])]
        seventh += weights[np.uintp(features[k + 1])]
    for k in range(0, NUM_VOTES, 2):
        voted += weights[k] * shares[k]
        shared += weights[k + 1] * shares[k + 1]
    bias = weights[np.uintp(features[0])]
    general = ((voted + shared) + (first + second)) + ((third + fourth) + (fifth + bias))
    return float(general + (sixth + seventh))


@lean
def _step(weights: Float32Array, squares: Float32Array, k: int, gradient: float, rate: float) -> None:
    squares[k] += gradient * gradient
    weights[k] += rate * gradient / np.sqrt(squares[k])


@lean
def _learn_one(
    shares: Float32Array, features: Int32Array, was_accepted: int, weights: Float32Array, squares: Float32Array
) -> None:
    logit = _logit(weights, shares, features)
    error = was_accepted - squash(weights[SCALE] * logit + weights[OFFSET])
    _step(weights, squares, SCALE, error * min(max(logit, -_MOST_LOGIT), _MOST_LOGIT), _SCALE_RATE)
    _step(weights, squares, OFFSET, error, _SCALE_RATE)
    error = was_accepted - squash(logit)
    for k in range(NUM_VOTES):
        _step(weights, squares, k, error * shares[k], _VOTE_RATE)
    for k in range(NUM_GENERAL_KINDS):
        _step(weights, squares, features[k], error, _RATE)
    for k in range(NUM_GENERAL_KINDS, NUM_KINDS):
        _step(weights, squares, features[k], error, _TOKEN_RATE)


def _compile(stamp: int) -> Callable[..., None]:
    """`learn`, cached by its sources; see `stamp`."""

    @kernel
    def learn(
        offsets: Int64Array,
        parents: Int32Array,
        estimates: Float32Array,
        shares: Float32Array,
        features: Int32Array,
        was_accepted: NDArray[np.int8],
        weights: Float32Array,
        squares: Float32Array,
        reliability: Float64Array,
    ) -> None:
        """Learns from every drafted token whose parent was accepted.

        Args:
            offsets: int64 [B + 1], of the rows' drafts.
            parents: int32 [D], within the row.
            estimates: float32 [D], as drafted.
            shares: float32 [D, votes].
            features: int32 [D, kinds].
            was_accepted: int8 [D]: 1, 0, or -1 where it is not known.
            weights: see `Acceptance`; changed in place, as are all that follow.
            squares: see `Acceptance`.
            reliability: see `Acceptance`.
        """
        assert stamp >= 0
        for b in range(offsets.size - 1):
            for i in range(offsets[b], offsets[b + 1]):
                if was_accepted[i] < 0 or (parents[i] >= 0 and was_accepted[offsets[b] + parents[i]] != 1):
                    continue
                bin_ = min(int(estimates[i] * NUM_BINS), NUM_BINS - 1)
                reliability[bin_, 0] += 1
                reliability[bin_, 1] += estimates[i]
                reliability[bin_, 2] += was_accepted[i]
                _learn_one(shares[i], features[i], was_accepted[i], weights, squares)

    compiled: Callable[..., None] = learn
    return compiled


learn = _compile(STAMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Drafted tokens whose acceptance was estimated alike.

    Example: 200 tokens estimated at 0.52 on average, of which 110 were accepted, have `accepted` 0.55.
    """

    num_drafted: int
    """Drafted tokens that were tried: those before them were accepted."""
    estimate: float
    """Mean estimate."""
    accepted: float
    """Share that was accepted."""


def as_bins(table: NDArray[np.float64]) -> tuple[ReliabilityBin, ...]:
    """The bins of a table [Z, 3] of counts, sums of estimates and accepted ones; empty bins are left out."""
    return tuple(
        ReliabilityBin(num_drafted=int(count), estimate=float(total / count), accepted=float(accepted / count))
        for count, total, accepted in table
        if count > 0
    )


def calibration_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """Mean distance of estimate and share over all tried tokens (expected calibration error); 0 where there are none.

    Example: 100 tokens at 0.5 of which 60 were accepted, and 300 at 0.9 of which 270 were: (100 * 0.1 + 0) / 400.
    """
    num_tried = sum(item.num_drafted for item in bins)
    if num_tried == 0:
        return 0.0
    return sum(item.num_drafted * abs(item.estimate - item.accepted) for item in bins) / num_tried
