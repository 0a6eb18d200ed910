"""Whether moving a running rollout to another worker pays.

Knows times of decode steps and of prefill. Knows nothing of workers but how many rollouts they run, and of no clock.

    S slots of a worker
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

LATE = 1.1
"""A rollout is an outlier from this many times its predicted length on (the floor of the paper's beta, section 6.3)."""

FEW = 0.1
"""Moves that free a worker are of the last tenth of its share (the paper's alpha, section 6.3)."""

HYSTERESIS = 1.25
"""A move has to save this many times what it costs."""

MAX_MOVES = 4
"""Moves of one rollout at most."""


@njit(cache=True)
def saved_s(
    num_generated: float,
    belief: float,
    max_tokens: float,
    rows_here: int,
    rows_there: int,
    token_s: NDArray[np.float64],
    prefill_s: float,
    num_context: float,
) -> float:
    """Seconds by which a rollout ends sooner on another worker, what its prefill takes there included.

    How long an outlier still runs is not known: it is taken to go on for as long as it has outgrown its prediction by,
    and a quarter of its length at least, up to `max_tokens`. Where that is little, nothing is saved by moving it.

    Args:
        num_generated: its tokens so far.
        belief: the longest length predicted of its worker's share.
        max_tokens: no rollout is longer.
        rows_here: running rollouts where it is, itself included.
        rows_there: running rollouts where it would go.
        token_s: float64 [S + 1]: seconds a token by running rollouts.
        prefill_s: seconds per prefilled token.
        num_context: tokens to prefill there: its prompt and what it has.

    Returns:
        Positive where it pays, `HYSTERESIS` included; 0 or less where it does not, and for what is no outlier.

    Example: with steps of 20 + 0.05 s a row, 10,000 tokens where 8,000 were predicted, and prefill for 0.1 s a token:
    from 128 to 39 other rows it saves 2,500 x 4.4 s = 11,000 s and costs 1.25 x 1,000 s.
    """
    if num_generated < LATE * belief:
        return 0.0
    remaining = min(max(num_generated - belief, 0.25 * num_generated), max_tokens - num_generated)
    saved: float = remaining * (token_s[rows_here] - token_s[rows_there + 1]) - HYSTERESIS * prefill_s * num_context
    return saved
