"""Chooses the worker of the same step that a running rollout moves to.

Both the simulator and the runtime call these functions.

    W workers, S slots a worker
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.compile_once import compiled_once
from treering.schedule.simulator.migration import FEW, HYSTERESIS, saved_s

OFF, FASTER, DRAIN, CONSOLIDATE = 0, 1, 2, 3
"""`policy.Moving` as numbers."""


class Loads(NamedTuple):
    """Load of the workers in one step."""

    running: NDArray[np.int64]
    """int64 [W]: running rollouts."""
    reach: NDArray[np.float64]
    """float64 [W]: longest predicted length of the share."""
    firsts: NDArray[np.int64]
    """int64 [W]: number of the share's first rollout."""
    heads: NDArray[np.int64]
    """int64 [W]: number of the first one that has not started."""
    ends: NDArray[np.int64]
    """int64 [W]: number after the last one."""


class Prices(NamedTuple):
    """Times and limits."""

    token_s: NDArray[np.float64]
    """float64 [S + 1]: seconds a token by running rollouts."""
    prefill_s: float
    """Per prefilled token."""
    max_tokens: float
    """No rollout is longer."""


@compiled_once()
def has_tail(loads: Loads, worker: int) -> bool:
    """Whether a worker runs at most the last tenth of its share, or one rollout, and has no queue."""
    share = loads.ends[worker] - loads.firsts[worker]
    return bool(loads.heads[worker] == loads.ends[worker] and 0 < loads.running[worker] <= max(1.0, FEW * share))


@compiled_once()
def fullest_tail(loads: Loads, worker: int, num_slots: int) -> int:
    """The other worker without a queue that runs the most rollouts, at least as many, and has slots; -1 for none."""
    num_running, found = loads.running[worker], -1
    for other in range(loads.running.size):
        fits = num_running <= loads.running[other] <= num_slots - num_running
        has_queue = loads.heads[other] < loads.ends[other]
        if other != worker and fits and not has_queue and (found < 0 or loads.running[other] > loads.running[found]):
            found = other
    return found


@compiled_once()
def target_of_outlier(
    loads: Loads, prices: Prices, moving: int, worker: int, num_generated: float, num_context: float
) -> int:
    """The worker that a running rollout should move to; -1 if it should stay.

    Args:
        loads: of all workers.
        prices: of tokens.
        moving: `FASTER` or `DRAIN`.
        worker: its current worker.
        num_generated: its tokens so far, `migration.LATE` times the worker's reach or more.
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
    if moving != DRAIN or not has_tail(loads, worker):
        return -1
    likely_s = min(0.25 * num_generated, prices.max_tokens - num_generated) * prices.token_s[1]
    if likely_s <= HYSTERESIS * prices.prefill_s * num_context:
        return -1
    fullest: int = _of_longer_share(loads, worker, num_slots, 1)
    return fullest


@compiled_once()
def _of_longer_share(loads: Loads, worker: int, num_slots: int, sign: int) -> int:
    """The worker of a longer share with a slot that runs the most rollouts (sign 1) or the fewest (-1); -1 for none."""
    found = -1
    for other in range(loads.running.size):
        has_room = loads.reach[other] > loads.reach[worker] and 0 < loads.running[other] < num_slots
        if has_room and (found < 0 or sign * loads.running[other] > sign * loads.running[found]):
            found = other
    return found
