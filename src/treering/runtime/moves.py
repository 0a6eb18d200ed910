"""Choose which running rollouts move from one worker to another within a step.

The rules are those of the simulator (`schedule.migration`).

    W workers
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from treering.engine.protocol import RolloutKey
from treering.runtime.messages import Work
from treering.runtime.open_step import OpenStep
from treering.schedule.cluster import Cluster
from treering.schedule.migration import (
    LATE,
    MAX_MOVES,
    Loads,
    Prices,
    freed_s,
    fullest_tail,
    has_tail,
    likely_left,
    target_of_outlier,
)

_NUM_LONGEST = 8
"""Number of a worker's longest rollouts that are checked for outliers."""


Held: TypeAlias = Mapping[RolloutKey, Work]
"""Rollouts of a step that are in a worker's engine, running or queued."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Rollouts that move to another worker."""

    target: int
    keys: tuple[RolloutKey, ...]


def prices_of(cluster: Cluster) -> Prices:
    """Return a cluster's token times; prefilling a token takes at least as long as one more row in a decode step."""
    latency = cluster.latency
    token_s = latency.token_s(cluster.num_slots)
    row_s = (token_s[-1] - token_s[1]) / max(cluster.num_slots - 1, 1)
    return Prices(token_s, max(latency.prefill_s, row_s), float(cluster.max_tokens))


def choose_move(open_step: OpenStep, prices: Prices, held: Sequence[Held], worker: int) -> Move | None:
    """Return the rollouts that a worker should give up now, or None.

    Args:
        open_step: the step, whose assignment decides which moves are allowed.
        prices: times of tokens.
        held: the rollouts of each worker.
        worker: the worker that may give up rollouts.

    Example: a worker with only 2 of its 30 rollouts left gives both to a worker that runs 9.
    """
    if open_step.moving == "off":
        return None
    loads = _loads(open_step, prices, held)
    if open_step.moving == "consolidate":
        return _tail(open_step, prices, loads, held, worker)
    return _outlier(open_step, prices, loads, held[worker], worker)


def _loads(open_step: OpenStep, prices: Prices, held: Sequence[Held]) -> Loads:
    """Return the workers' loads, as if every engine had filled its batch, which its next pass does."""
    workers, num_slots = range(len(held)), prices.token_s.size - 1
    sizes = np.array([open_step.share_size(worker) for worker in workers], np.int64)
    counts = np.array([len(each) for each in held], np.int64)
    queued = np.array([open_step.num_queued(worker) for worker in workers], np.int64)
    return Loads(
        running=np.minimum(counts, num_slots),
        reach=np.array([open_step.reach(worker) for worker in workers]),
        firsts=np.zeros(len(held), np.int64),
        # Moved rollouts come on top of the share, so a worker may have more than its size.
        heads=sizes - queued - np.maximum(counts - num_slots, 0),
        ends=sizes,
    )


def _tail(open_step: OpenStep, prices: Prices, loads: Loads, held: Sequence[Held], worker: int) -> Move | None:
    """Return the move of a worker's last rollouts to the worker with the fullest tail, if that saves time."""
    keys = tuple(held[worker])
    if open_step.can_be_stolen or not has_tail(loads, worker) or not all(_can_move(open_step, key) for key in keys):
        return None
    target = fullest_tail(loads, worker, prices.token_s.size - 1)
    if target < 0:
        return None
    longest = max(likely_left(open_step.so_far(key), open_step.expected(key), prices.max_tokens) for key in keys)
    context = float(sum(open_step.num_prompt_tokens(key) + open_step.so_far(key) for key in keys))
    freed = freed_s(longest, len(keys), loads.running[target], prices.token_s, prices.prefill_s, context)
    return Move(target=target, keys=keys) if freed > 0 else None


def _outlier(open_step: OpenStep, prices: Prices, loads: Loads, held: Held, worker: int) -> Move | None:
    """Return the move of the longest rollout that outgrew its worker's share, if another worker suits it better."""
    late = LATE * open_step.reach(worker)
    outliers = [key for key in held if open_step.so_far(key) >= late and _can_move(open_step, key)]
    for key in sorted(outliers, key=open_step.so_far, reverse=True)[:_NUM_LONGEST]:
        num_generated = float(open_step.so_far(key))
        context = open_step.num_prompt_tokens(key) + num_generated
        target = target_of_outlier(loads, prices, worker, num_generated, context)
        if target >= 0:
            return Move(target=target, keys=(key,))
    return None


def _can_move(open_step: OpenStep, key: RolloutKey) -> bool:
    """Return whether a rollout is running and has not moved too often."""
    return open_step.has_started(key) and open_step.num_moves(key) < MAX_MOVES
