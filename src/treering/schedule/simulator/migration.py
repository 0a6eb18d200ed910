"""Estimates whether moving a running rollout to another worker saves time.

S slots of a worker
"""

import numpy as np
from numpy.typing import NDArray

from treering.compile_once import compiled_once

LATE = 1.1
"""A rollout is an outlier at this many times its predicted length (the floor of the paper's beta, section 6.3)."""

FEW = 0.1
"""A worker is freed only by moving the last tenth of its share (the paper's alpha, section 6.3)."""

HYSTERESIS = 1.25
"""A move must save this many times its cost."""

MAX_MOVES = 4
"""Maximum moves of one rollout."""


@compiled_once()
def saved_s(
    num_generated: float,
    predicted: float,
    max_tokens: float,
    rows_here: int,
    rows_there: int,
    token_s: NDArray[np.float64],
    prefill_s: float,
    num_context: float,
) -> float:
    """Seconds by which a rollout ends sooner on another worker, including its prefill there.

    The rest of an outlier is unknown. It is assumed to equal the excess over the prediction so far, at least a quarter
    of its length, and at most what `max_tokens` leaves.

    Args:
        num_generated: its tokens so far.
        predicted: the longest predicted length of its worker's share.
        max_tokens: no rollout is longer.
        rows_here: running rollouts on its worker, itself included.
        rows_there: running rollouts on the other worker.
        token_s: float64 [S + 1]: seconds a token by running rollouts.
        prefill_s: seconds per prefilled token.
        num_context: tokens to prefill there: its prompt and its tokens so far.

    Returns:
        Positive if moving pays, with `HYSTERESIS`; 0 or less if not, and for rollouts that are no outliers.

    Example: with steps of 20 + 0.05 s a row, 10,000 tokens where 8,000 were predicted, and prefill for 0.1 s a token:
    from 128 to 39 other rows it saves 2,500 x 4.4 s = 11,000 s and costs 1.25 x 1,000 s.
    """
    if num_generated < LATE * predicted:
        return 0.0
    remaining = min(max(num_generated - predicted, 0.25 * num_generated), max_tokens - num_generated)
    saved: float = remaining * (token_s[rows_here] - token_s[rows_there + 1]) - HYSTERESIS * prefill_s * num_context
    return saved


@compiled_once()
def likely_left(num_generated: float, predicted: float, max_tokens: float) -> float:
    """Assumed remaining tokens of a running rollout: what its prediction leaves, at least a quarter of its length.

    Example: with 900 of 1,000 predicted tokens 225, with 100 of them 900, with 900 of at most 1,000 no more than 100.
    """
    return min(max(predicted - num_generated, 0.25 * num_generated), max_tokens - num_generated)


@compiled_once()
def freed_s(
    num_left: float,
    num_moved: int,
    rows_there: int,
    token_s: NDArray[np.float64],
    prefill_s: float,
    num_context: float,
) -> float:
    """Seconds that a worker is freed by moving all its rollouts away, minus the cost at their new worker.

    Args:
        num_left: assumed remaining tokens of the longest of them.
        num_moved: number of rollouts.
        rows_there: running rollouts on the new worker.
        token_s: float64 [S + 1]: seconds a token by running rollouts.
        prefill_s: seconds per prefilled token.
        num_context: tokens to prefill there, of all together.

    Returns:
        Positive if moving pays, with `HYSTERESIS`.

    Example: with steps of 20 + 0.05 s a row, 2 rollouts with 1,000 tokens to go moved to 30 others: 1,000 x 20.1 s
    are freed, and cost 1.25 x 1,000 x 0.1 s; prefilling 100,000 tokens for 0.1 s each would cost 12,500 s more.
    """
    slower_s = num_left * (token_s[rows_there + num_moved] - token_s[rows_there])
    freed: float = num_left * token_s[num_moved] - HYSTERESIS * (prefill_s * num_context + slower_s)
    return freed
