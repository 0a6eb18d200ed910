"""Decide when a running rollout moves to another worker, and to which, for the simulator and the runtime."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.compiling.once import compiled_once

LATE = 1.1
"""A rollout is an outlier from this many times its predicted length on (the floor of the paper's beta, section 6.3)."""

FEW = 0.1
"""A worker is freed only by moving the last tenth of its share (the paper's alpha, section 6.3)."""

HYSTERESIS = 1.25
"""A move must save this many times its cost."""

MAX_MOVES = 4
"""Most moves of one rollout."""


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
    """Return the seconds by which a rollout ends sooner on another worker, with its prefill there.

    The remaining length of an outlier is unknown. It is assumed to equal the excess over the prediction so far, at
    least a quarter of its length, and at most what `max_tokens` leaves.

    Args:
        num_generated: its tokens so far.
        predicted: the longest predicted length of its worker's share.
        max_tokens: most tokens of a rollout.
        rows_here: running rollouts on its worker, itself included.
        rows_there: running rollouts on the other worker.
        token_s: float64 [S + 1]: seconds per token by number of running rollouts.
        prefill_s: seconds per prefilled token.
        num_context: tokens to prefill there: its prompt and its tokens so far.

    Returns:
        Positive if moving pays, with `HYSTERESIS`; 0 or less if not, and for rollouts that are not outliers.

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
    """Return the assumed remaining tokens of a running rollout: as predicted, but at least a quarter of its length.

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
    """Return the seconds for which a worker is freed by moving all its rollouts away, minus the cost at the new worker.

    Args:
        num_left: assumed remaining tokens of the longest of them.
        num_moved: number of rollouts.
        rows_there: running rollouts on the new worker.
        token_s: float64 [S + 1]: seconds per token by number of running rollouts.
        prefill_s: seconds per prefilled token.
        num_context: tokens to prefill there, of all rollouts together.

    Returns:
        Positive if moving pays, with `HYSTERESIS`.

    Example: with steps of 20 + 0.05 s a row, 2 rollouts with 1,000 tokens to go move to 30 others: 1,000 x 20.1 s are
    freed, and cost 1.25 x 1,000 x 0.1 s; prefilling 100,000 tokens for 0.1 s each would cost 12,500 s more.
    """
    slower_s = num_left * (token_s[rows_there + num_moved] - token_s[rows_there])
    freed: float = num_left * token_s[num_moved] - HYSTERESIS * (prefill_s * num_context + slower_s)
    return freed


OFF, DRAIN, CONSOLIDATE = 0, 1, 2
"""`policy.Moving` as numbers."""


class Loads(NamedTuple):
    """Load of the workers in one step."""

    running: NDArray[np.int64]
    """int64 [W]: running rollouts."""
    reach: NDArray[np.float64]
    """float64 [W]: longest predicted length of the share."""
    firsts: NDArray[np.int64]
    """int64 [W]: index of the share's first rollout."""
    heads: NDArray[np.int64]
    """int64 [W]: index of the first rollout that has not started."""
    ends: NDArray[np.int64]
    """int64 [W]: index after the last rollout."""


class Prices(NamedTuple):
    """Times of tokens, and the length limit."""

    token_s: NDArray[np.float64]
    """float64 [S + 1]: seconds per token by number of running rollouts."""
    prefill_s: float
    """Seconds per prefilled token."""
    max_tokens: float
    """Most tokens of a rollout."""


@compiled_once()
def has_tail(loads: Loads, worker: int) -> bool:
    """Return whether a worker runs at most the last tenth of its share, or one rollout, and has no queue."""
    share = loads.ends[worker] - loads.firsts[worker]
    return bool(loads.heads[worker] == loads.ends[worker] and 0 < loads.running[worker] <= max(1.0, FEW * share))


@compiled_once()
def fullest_tail(loads: Loads, worker: int, num_slots: int) -> int:
    """Return the other worker with the most rollouts, without a queue and with enough slots; -1 for none.

    It must run at least as many rollouts as `worker`.
    """
    num_running, found = loads.running[worker], -1
    for other in range(loads.running.size):
        fits = num_running <= loads.running[other] <= num_slots - num_running
        has_queue = loads.heads[other] < loads.ends[other]
        if other != worker and fits and not has_queue and (found < 0 or loads.running[other] > loads.running[found]):
            found = other
    return found


@compiled_once()
def target_of_outlier(loads: Loads, prices: Prices, worker: int, num_generated: float, num_context: float) -> int:
    """Return the worker that a running rollout should move to; -1 if it should stay.

    Args:
        loads: loads of all workers.
        prices: times of tokens, and the length limit.
        worker: its current worker.
        num_generated: its tokens so far, at least `LATE` times the worker's reach.
        num_context: tokens to prefill at the new worker.
    """
    num_slots = prices.token_s.size - 1
    emptiest: int = _of_longer_share(loads, worker, num_slots, -1)
    if emptiest < 0:
        return -1
    saved = saved_s(
        num_generated,
        loads.reach[worker],
        prices.max_tokens,
        loads.running[worker],
        loads.running[emptiest],
        prices.token_s,
        prices.prefill_s,
        num_context,
    )
    if saved > 0:
        return emptiest
    if not has_tail(loads, worker):
        return -1
    likely_s = min(0.25 * num_generated, prices.max_tokens - num_generated) * prices.token_s[1]
    if likely_s <= HYSTERESIS * prices.prefill_s * num_context:
        return -1
    fullest: int = _of_longer_share(loads, worker, num_slots, 1)
    return fullest


@compiled_once()
def _of_longer_share(loads: Loads, worker: int, num_slots: int, sign: int) -> int:
    """Return the worker of a longer share with a slot and the most rollouts (sign 1) or fewest (-1); -1 for none."""
    found = -1
    for other in range(loads.running.size):
        has_room = loads.reach[other] > loads.reach[worker] and 0 < loads.running[other] < num_slots
        if has_room and (found < 0 or sign * loads.running[other] > sign * loads.running[found]):
            found = other
    return found
