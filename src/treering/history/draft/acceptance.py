"""Estimate how likely a drafted token is to be accepted, from what the engine accepted before.

The estimate is a logistic model over the features of a candidate, with a table of how often its estimates came true. It
uses neither time nor random numbers: the same calls give the same estimates.

    B rows   D drafted tokens
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.errors import InputError, StateError
from treering.history.draft_types import DraftRows, Drafts
from treering.history.features import (
    ACCEPTED,
    NOT_TRIED,
    NUM_GENERAL_KINDS,
    NUM_KINDS,
    NUM_VOTES,
    NUM_WEIGHTS,
    REFUSED,
    squash,
)
from treering.history.jit import stamped
from treering.history.match.running_rows import RowStates

SHARES = (0.7, 0.1, 0.1, 0.1, 0.1, 0.2)
"""Weights of a candidate's vote shares: among all matches, in each of four sources, among the longest matches."""
NUM_BINS = 20
_RATE = 0.15
"""With 11 general kinds, a token that is never accepted is dropped within 30 rows; with 0.1 it takes over 60."""
_TOKEN_RATE = 0.4
"""Learning rate of the weights of single tokens, of which each is observed seldom."""
_VOTE_RATE = 0.02
_FIRST_SQUARES = 4.0
_SCALE_RATE = 0.3
_FIRST_SCALE_SQUARES = 100.0
_MOST_LOGIT = 8.0
_MOST_WEIGHT = 1e6
"""Far beyond any learnt weight; sums of such weights are finite, also in float32."""
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
"""Least and greatest value in each array of a state."""


class Acceptance:
    """Weights that follow what is observed, and how often estimates of each size came true.

    Every candidate whose parent was accepted is one observation. It moves a weight by the error of the model, and less
    the more the weight has moved before (AdaGrad: Duchi et al. 2011, section 1.1). Weights of tokens that were observed
    a few times are too certain. So a scale and an offset turn a logit into the estimate; they are learnt from how the
    model's logits hold on tokens before it learns from them (Platt 1999, section 2).

    Example: with all weights 0 and a scale of 1 a candidate is estimated at 0.5; accepted once, the weights of its
    general features rise by 0.15 * 0.5 / sqrt(4 + 0.25) = 0.036 each.

    Attributes:
        weights: float32 [votes + features + 2], the last two the scale and the offset.
        squares: float32, aligned: sums of squared gradients.
        reliability: float64 [20, 3]: for estimates from 0 to 1 in steps of 0.05 their number, their sum, and how many
            tokens were accepted.
        num_undrafted: int64 [1], rows without a draft since the last probe.
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
        """Return copies of all arrays."""
        return {name: getattr(self, name).copy() for name in _LIMITS}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned.

        Raises:
            InputError: names, shapes or values are wrong; nothing changes then.
        """
        if state.keys() != _LIMITS.keys():
            raise InputError(
                f"a drafter's state must have {sorted(_LIMITS)}, got {sorted(state)}; pass a state() unchanged"
            )
        taken = {name: np.asarray(values) for name, values in state.items()}
        for name, values in taken.items():
            _check(name, values, getattr(self, name).shape)
        for name, values in taken.items():
            getattr(self, name)[:] = values


def _check(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    least, most = _LIMITS[name]
    is_right = values.dtype.kind in "iuf" and values.shape == shape
    # NaN fails both comparisons.
    if not is_right or not ((values >= least) & (values <= most)).all():
        raise InputError(
            f"{name} of a drafter's state must be finite, from {least:g} to {most:g} and of shape {shape}, got shape "
            f"{values.shape} or another value; pass a state() unchanged"
        )


@lean
def estimate(weights: Float32Array, shares: Float32Array, features: Int32Array) -> float:
    """Return the estimated probability that a candidate is accepted.

    Args:
        weights: see `Acceptance`.
        shares: float32 [votes], stretched.
        features: int32 [kinds], indices of the weights.
    """
    return float(squash(weights[SCALE] * _logit(weights, shares, features) + weights[OFFSET]))


@lean
def _logit(weights: Float32Array, shares: Float32Array, features: Int32Array) -> float:
    # Separate sums, so that one addition need not wait for the one before.
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


@stamped
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
    """Learn from every drafted token whose parent was accepted.

    Args:
        offsets: int64 [B + 1], offsets of the rows' drafts.
        parents: int32 [D], index within the row's draft.
        estimates: float32 [D], estimates when drafted.
        shares: float32 [D, votes].
        features: int32 [D, kinds].
        was_accepted: int8 [D]: 1, 0, or -1 if unknown.
        weights: see `Acceptance`; changed in place, like the next two.
        squares: see `Acceptance`.
        reliability: see `Acceptance`.
    """
    for b in range(offsets.size - 1):
        for i in range(offsets[b], offsets[b + 1]):
            if was_accepted[i] < 0 or (parents[i] >= 0 and was_accepted[offsets[b] + parents[i]] != 1):
                continue
            bin_ = min(int(estimates[i] * NUM_BINS), NUM_BINS - 1)
            reliability[bin_, 0] += 1
            reliability[bin_, 1] += estimates[i]
            reliability[bin_, 2] += was_accepted[i]
            _learn_one(shares[i], features[i], was_accepted[i], weights, squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Drafted tokens with similar estimates.

    Example: 200 tokens estimated at 0.52 on average, of which 110 were accepted, have `accepted` 0.55.
    """

    num_drafted: int
    """Drafted tokens that were tried, because the tokens before them were accepted."""
    estimate: float
    """Mean estimate."""
    accepted: float
    """Share of accepted tokens."""


def as_bins(table: NDArray[np.float64]) -> tuple[ReliabilityBin, ...]:
    """Return the bins of a table [Z, 3] of counts, sums of estimates and accepted tokens; skip empty bins."""
    return tuple(
        ReliabilityBin(num_drafted=int(count), estimate=float(total / count), accepted=float(accepted / count))
        for count, total, accepted in table
        if count > 0
    )


NO_LEAF = -2
"""Leaf of a row if the engine does not report its last accepted token."""
_WRONG_COUNT, _WRONG_LEAF = 1, 2


def check_latest(latest: tuple[DraftRows, Drafts] | None, rows: DraftRows) -> Drafts:
    """Return the drafts of the latest rows.

    Raises:
        StateError: there are none, or they belong to other rows.
    """
    if latest is None or latest[0] is not rows:
        raise StateError("observe takes the rows of the latest propose, the same object, and only once; propose first")
    return latest[1]


def as_counts(
    drafts: Drafts, accepted: NDArray[np.integer[Any]], ended: BoolArray | None, leaves: NDArray[np.integer[Any]] | None
) -> tuple[Int64Array, BoolArray, Int64Array]:
    """Return accepted tokens, rows that were cut off, and last accepted tokens (-2 if not given), one per row.

    Raises:
        InputError: a shape or dtype is wrong.
    """
    counts = np.asarray(accepted)
    was_cut = np.zeros(counts.shape, np.bool_) if ended is None else np.asarray(ended)
    last = np.full(counts.shape, NO_LEAF, np.int64) if leaves is None else np.asarray(leaves)
    shape = (drafts.offsets.size - 1,)
    if not (_is_integers(counts, shape) and _is_integers(last, shape) and was_cut.shape == shape) or (
        was_cut.dtype != np.bool_
    ):
        raise InputError(
            f"accepted and leaves must be integers and ended booleans, all of shape {shape}, got {counts.dtype} of "
            f"shape {counts.shape}, {last.dtype} of shape {last.shape} and {was_cut.dtype} of shape {was_cut.shape}; "
            "pass one entry per row"
        )
    return counts.astype(np.int64, copy=False), was_cut, last.astype(np.int64, copy=False)


def check_fault(fault: int, drafts: Drafts, counts: Int64Array, last: Int64Array) -> None:
    """Raise the fault that `mark` found.

    Raises:
        InputError: more tokens are accepted than drafted, or a leaf is not that deep.
    """
    if fault == 0:
        return
    num_drafted = drafts.offsets[1:] - drafts.offsets[:-1]
    if fault == _WRONG_COUNT:
        raise InputError(
            f"a row must accept between none and all of its drafted tokens, got {counts.tolist()} of "
            f"{num_drafted.tolist()}; count drafted tokens only, without the one sampled after them"
        )
    raise InputError(
        f"a leaf must be an index in its row's draft and as deep as the row's accepted tokens, -1 for none, got "
        f"{last.tolist()} for {counts.tolist()} of {num_drafted.tolist()}; count within the row"
    )


def _is_integers(values: NDArray[Any], shape: tuple[int, ...]) -> bool:
    return values.shape == shape and values.dtype.kind in "iu"


@lean
def _find_fault(
    offsets: Int64Array, parents: Int32Array, counts: Int64Array, leaves: Int64Array, has_leaves: bool
) -> int:
    """Return the fault of an engine's answer: a count of accepted tokens, a leaf, or 0 for none."""
    fault = 0
    for b in range(counts.size):
        size = offsets[b + 1] - offsets[b]
        if not 0 <= counts[b] <= size:
            return _WRONG_COUNT
        if has_leaves and (not -1 <= leaves[b] < size or _depth_of(parents[offsets[b] :], leaves[b]) != counts[b]):
            fault = _WRONG_LEAF
    return fault


@lean
def _depth_of(parents: Int32Array, index: int) -> int:
    """Return the number of tokens from the beginning of a row's draft down to an index, itself included."""
    depth = 0
    while index >= 0:
        depth += 1
        index = parents[index]
    return depth


@stamped
def mark(
    offsets: Int64Array,
    parents: Int32Array,
    accepted: Int64Array,
    leaves: Int64Array,
    has_leaves: bool,
    was_cut: BoolArray,
    was_accepted: NDArray[np.int8],
    states: RowStates,
    slots: Int64Array,
) -> int:
    """Write the outcome of every drafted token: 1, 0, or -1 if unknown; and the outcome of every row's draft.

    Args:
        offsets: int64 [B + 1], offsets of the rows' drafts.
        parents: int32 [D], index within the row's draft.
        accepted: int64 [B], accepted tokens.
        leaves: int64 [B], index of the last accepted token, -1 for none; below -1 it is derived from the count, up to
            where the draft branches.
        has_leaves: whether the engine gave leaves, which are checked then.
        was_cut: bool [B], rows that were cut off there: later drafted tokens were not tried.
        was_accepted: int8 [D], written.
        states: written in the slots of rows with a draft.
        slots: int64 [B], slots of the rows.

    Returns:
        0, or the fault of the engine's answer, see `check_fault`; nothing is written then.
    """
    fault: int = _find_fault(offsets, parents, accepted, leaves, has_leaves)
    if fault != 0:
        return fault
    for b in range(offsets.size - 1):
        begin, end = offsets[b], offsets[b + 1]
        if begin == end:
            continue
        num_left: int = _mark_row(parents[begin:end], accepted[b], leaves[b], was_cut[b], was_accepted[begin:end])
        slot = slots[b]
        states.num_expected[slot] = states.num_tokens[slot] + accepted[b] + 1
        if was_cut[b] or num_left < 0:
            states.state[slot] = NOT_TRIED
        else:
            states.state[slot] = REFUSED if num_left > 0 else ACCEPTED
    return 0


@lean
def _mark_row(parents: Int32Array, accepted: int, leaf: int, was_cut: bool, was_accepted: NDArray[np.int8]) -> int:
    """Mark one row; return how many tokens were drafted right after the last accepted one, -1 if unknown."""
    is_known, num_left = True, 0
    if leaf < -1:
        leaf, is_known = _only_path(parents, accepted)
    for i in range(parents.size):
        was_accepted[i] = -1
    index = leaf
    while index >= 0:
        was_accepted[index] = 1
        index = parents[index]
    for i in range(parents.size):
        if was_accepted[i] == 1:
            continue
        if parents[i] == leaf:
            num_left += 1
            was_accepted[i] = 0 if is_known and not was_cut else -1
        elif parents[i] < 0 or was_accepted[parents[i]] == 1:
            was_accepted[i] = 0
    return num_left if is_known else -1


@lean
def _only_path(parents: Int32Array, length: int) -> tuple[int, bool]:
    """Return the index `length` tokens down a draft, and True if it is the only one; else the last before a branch."""
    index = -1
    for _ in range(length):
        child, num_children = -1, 0
        for i in range(index + 1, parents.size):
            if parents[i] == index:
                child, num_children = i, num_children + 1
        if num_children != 1:
            return index, False
        index = child
    return index, True
