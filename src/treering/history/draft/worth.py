"""What a drafted token is worth to each row of a batch, because not every row's tokens shorten a step.

If further requests wait, a row that ends makes room for the next, so the tokens of all rows are worth the same. If none
waits, passes go on until the last row has ended, and a row that ends earlier only makes later passes narrower. Next to
rows without drafts, those with drafts do not end last, unless they are longer. How likely that is depends on the spread
of lengths, which is that of the prompts' earlier rollouts.

    B rows
"""

from typing import NamedTuple

from treering.arrays import BoolArray, Float64Array, Int64Array
from treering.compiling.lean import lean
from treering.history.match.published import Histories
from treering.history.match.running import Running
from treering.history.match.running_rows import RowStates
from treering.history.match.sources import Rows, is_due
from treering.history.store.prompt_index import MARKER


class Value(NamedTuple):
    """What drafted tokens are worth in a step."""

    gains: Float64Array  # [B], tokens that each row's drafts gain a pass, on average
    weights: Float64Array  # [B], see `weigh_rows`
    worth: Float64Array  # [B]


_ONE = 1024
"""One token in `RowStates.gain`."""
_KEPT = 0.875
"""Share of a row's average gain that stays after a step."""
_LEAST_GAIN = 0.01
_PRIOR, _PRIOR_SPREAD = 0.0625, 0.5
"""Relative spread of lengths without history, and its weight in rollouts."""
_MOST_SHAPE = 256.0


@lean
def note_gains(
    rows: Rows, running: Running, states: RowStates, offsets: Int64Array, paths: Float64Array, is_probe: BoolArray,
    gains: Float64Array,
) -> None:  # fmt: skip
    """Add the tokens that each row's draft is expected to gain to the row's average, and write the averages [B]."""
    for b in range(gains.size):
        slot = running.slots[rows.leaders[b]]
        if is_due(rows, b):
            expected = 0.0
            for i in range(offsets[b], offsets[b] if is_probe[b] else offsets[b + 1]):
                expected += _ONE * paths[i]
            before = states.gain[slot] if states.gain[slot] >= 0 else expected
            states.gain[slot] = int(_KEPT * before + (1 - _KEPT) * expected)
        gains[b] = max(states.gain[slot], 0) / _ONE


@lean
def weigh_rows(value: Value, leaders: Int64Array, shape: float, fixed: float) -> None:
    """Write what a drafted token is worth to each row, relative to its share of a pass, and the sum for each leader.

    Lengths are taken as Fréchet-distributed, because the mean of the longest is then a sum: sum(length ** shape) **
    (1 / shape). What all drafts save of it is divided among the rows by what would be lost without the drafts of each.

    Args:
        value: `weights` and `worth` are written. Gains become at least 0.01, and at most 1, because the first ones save
            most.
        leaders: int64 [B].
        shape: of the lengths.
        fixed: share of a pass that does not depend on its rows, and is saved only as far as the last row ends sooner;
            0 if requests wait, so that all rows are worth the same.

    Example: if half of a pass is fixed and all rows gain a token a pass, all weights are 1.0. If lengths hardly spread
    and one of many rows gains nothing, the others have weights of 0.5: their drafts only make passes narrower.
    """
    gains, weights, worth = value
    num_rows, drafted, total = gains.size, 0.0, 0.0
    for b in range(num_rows):
        gains[b] = min(max(gains[b], _LEAST_GAIN), 1.0)
        # The row's part of the sum, for a length of 1.
        worth[b] = (1 + gains[b]) ** -shape
        drafted += worth[b]
    for b in range(num_rows):
        weights[b] = ((drafted - worth[b] + 1) / drafted) ** (1 / shape) - 1
        total += weights[b]
    saved = (num_rows / drafted) ** (1 / shape) - 1
    for b in range(num_rows):
        weights[b] = 1.0 if fixed == 0 else 1 - fixed + fixed * num_rows * saved * weights[b] / total / gains[b]
        worth[b] = 0.0
    for b in range(num_rows):
        worth[leaders[b]] += weights[b]


@lean
def shape_of_lengths(prompts: Int64Array, history: Histories) -> float:
    """Return the shape of a Fréchet distribution that spreads like the lengths of earlier rollouts.

    Args:
        prompts: int64 [B], slots of the rows' prompts.
        history: rollouts of these prompts.

    Example: 4 without history; 49 for 16 rollouts of one length each, because lengths may spread all the same.
    """
    num, mean, squares = 0, 0.0, 0.0
    for b in range(prompts.size):
        start, size = history.spans[prompts[b]]
        # Markers sort before all tokens, so the order begins with them, and equal entries are ascending.
        k = 0
        while k < size and history.text[start + history.order[start + k]] == MARKER:
            begin, end = history.order[start + k], size
            k += 1
            if k < size and history.text[start + history.order[start + k]] == MARKER:
                end = history.order[start + k]
            num += 1
            before = end - begin - mean
            mean += before / num
            squares += before * (end - begin - mean)
    spread = (_PRIOR * _PRIOR_SPREAD**2 + squares / max(mean, 1.0) ** 2) / (_PRIOR + num)
    # Exact enough from a spread of 0.05 (31) to one of 0.7 (3.1).
    return float(min(1 + 1.5 / spread**0.5, _MOST_SHAPE))
