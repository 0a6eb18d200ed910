"""How likely a drafted token is to be accepted, learnt from what was accepted before.

Knows counts per cell: source, length of the match, agreement among its occurrences. Knows nothing of tokens, of clocks
and of chance: the same calls give the same estimates. A cell that looks too poor to draft from is tried again after
enough refusals, the longer the more often it has been tried, so that it can recover and never costs much.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.errors import InputError

Source = Literal["history", "siblings", "own"]
"""history: published rollouts of the prompt. siblings: running rollouts of the group. own: the row's own context."""

SOURCES: tuple[Source, ...] = ("history", "siblings", "own")
NUM_LENGTHS = 16
"""Longer matches count as this long."""
NUM_SHARES = 5
NUM_CELLS = len(SOURCES) * NUM_LENGTHS * NUM_SHARES

# What is expected of a long match by share of the occurrences: all of one, all of more, 3/4, 1/2, less.
_PRIOR_BY_SHARE = (0.7, 0.85, 0.75, 0.55, 0.3)
_PRIOR_WEIGHT = 4.0
_KEEP = 1 - 1 / 256
_REFUSALS_PER_TRY = 8.0

Float64Array = NDArray[np.float64]


@njit(inline="always")
def cell_of(source: int, length: int, votes: int, total: int) -> int:
    """The cell of a continuation with `votes` of `total` occurrences behind a match of `length` >= 1 tokens."""
    if votes == total:
        share = 0 if total == 1 else 1
    elif 4 * votes >= 3 * total:
        share = 2
    else:
        share = 3 if 2 * votes >= total else 4
    return (source * NUM_LENGTHS + min(length, NUM_LENGTHS) - 1) * NUM_SHARES + share


@njit
def is_retried(cell: int, num_tried: Float64Array, num_refused: Float64Array) -> bool:
    """Counts a refusal of the cell; whether to try it all the same: after 8 of them, then after 16 more, ..."""
    num_refused[cell] += 1
    if num_refused[cell] < _REFUSALS_PER_TRY * (num_tried[cell] + 1):
        return False
    num_refused[cell] = 0
    return True


@njit(cache=True, nogil=True)
def learn(
    offsets: NDArray[np.int64],
    cells: NDArray[np.int32],
    accepted: NDArray[np.int64],
    ended: NDArray[np.bool_],
    num_tried: Float64Array,
    num_accepted: Float64Array,
    prior: Float64Array,
    estimate: Float64Array,
) -> None:
    """Counts the accepted tokens of every row, and the one that was refused behind them unless the row ended."""
    for b in range(accepted.size):
        num_drafted = offsets[b + 1] - offsets[b]
        num_known = accepted[b] if ended[b] else min(accepted[b] + 1, num_drafted)
        for i in range(num_known):
            cell = cells[offsets[b] + i]
            num_tried[cell] = num_tried[cell] * _KEEP + 1
            num_accepted[cell] = num_accepted[cell] * _KEEP + (1.0 if i < accepted[b] else 0.0)
            estimate[cell] = (num_accepted[cell] + _PRIOR_WEIGHT * prior[cell]) / (num_tried[cell] + _PRIOR_WEIGHT)


class Acceptance:
    """Accepted and tried counts by cell, fading with a memory of 256 tries, and the estimates they give.

    Example: a cell with prior 0.7 that accepted 3 of 4 has the estimate (3 + 4 * 0.7) / (4 + 4) = 0.725, but for what
    has faded in between.

    Attributes:
        num_tried: float64 [cells], faded.
        num_accepted: float64 [cells], faded.
        num_refused: float64 [cells], since the cell was last tried although its estimate was too low.
        prior: float64 [cells], the estimate before anything is known.
        estimate: float64 [cells], probability that a token is accepted, given that those before it were.
    """

    def __init__(self) -> None:
        self.num_tried = np.zeros(NUM_CELLS)
        self.num_accepted = np.zeros(NUM_CELLS)
        self.num_refused = np.zeros(NUM_CELLS)
        by_length = 1 - 0.5 ** np.arange(1, NUM_LENGTHS + 1)
        self.prior = np.tile(np.outer(by_length, _PRIOR_BY_SHARE).ravel(), len(SOURCES))
        self.estimate = self.prior.copy()

    def state(self) -> dict[str, Float64Array]:
        """Copies of all counts, float64 [cells] each."""
        return {name: getattr(self, name).copy() for name in ("num_tried", "num_accepted", "num_refused")}

    def load_state(self, state: Mapping[str, Float64Array]) -> None:
        """Takes what `state` gave.

        Raises:
            InputError: other names, shapes or values; nothing is taken then.
        """
        expected = self.state()
        if state.keys() != expected.keys():
            raise InputError(f"a drafter's state has {sorted(expected)}, got {sorted(state)}; pass a state() unchanged")
        for name, values in state.items():
            if np.shape(values) != (NUM_CELLS,) or not (np.isfinite(values) & (np.asarray(values) >= 0)).all():
                raise InputError(
                    f"{name} of a drafter's state is {NUM_CELLS} finite counts >= 0, got shape {np.shape(values)} or "
                    "another count; pass a state() unchanged"
                )
        for name, values in state.items():
            getattr(self, name)[:] = values
        self.estimate[:] = (self.num_accepted + _PRIOR_WEIGHT * self.prior) / (self.num_tried + _PRIOR_WEIGHT)
