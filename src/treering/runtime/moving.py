"""Which running rollouts go to another worker of their step.

Knows what workers run, and how far it is. Knows nothing of processes: whoever asks takes rollouts out and hands them
on.
The rules are those of the simulator (`schedule.destinations`, `schedule.migration`).

    W workers
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from treering.engine.rollout import RolloutKey
from treering.runtime.step_run import StepRun
from treering.schedule.cluster import Cluster
from treering.schedule.destinations import (
    FASTER,
    FREEING,
    Loads,
    Prices,
    fullest_tail,
    has_tail,
    outlier_goes_to,
)
from treering.schedule.migration import LATE, MAX_MOVES, freed_s, likely_left

_OUTLIERS = MappingProxyType({"faster": FASTER, "freeing": FREEING})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Rollouts that a worker gives to another."""

    source: int
    target: int
    keys: tuple[RolloutKey, ...]


def prices_of(cluster: Cluster) -> Prices:
    """What rollouts take there."""
    latency = cluster.latency
    return Prices(latency.token_s(cluster.num_slots), latency.prefill_s, float(cluster.max_tokens))


def choose_move(run: StepRun, prices: Prices, held: Sequence[Collection[RolloutKey]]) -> Move | None:
    """The next move of a step; None where everything stays.

    Args:
        run: the step, whose assignment says which moves there are.
        prices: of tokens.
        held: by worker: rollouts of this step that it runs, or that wait in its engine.

    Example: a worker with the last 2 of its 30 rollouts, whose next step can begin, gives both to one that runs 9.
    """
    if run.moving == "off":
        return None
    started = [[key for key in keys if run.has_started(key)] for keys in held]
    loads = _loads(run, held, started)
    for worker in range(len(held)):
        if run.moving == "gathering":
            move = _tail(run, prices, loads, worker, started[worker])
        else:
            move = _outlier(run, prices, loads, worker, started[worker])
        if move is not None:
            return move
    return None


def _loads(run: StepRun, held: Sequence[Collection[RolloutKey]], started: Sequence[Collection[RolloutKey]]) -> Loads:
    workers = range(len(held))
    sizes = np.array([run.share_size(worker) for worker in workers], np.int64)
    waiting = [run.num_queued(worker) + len(held[worker]) - len(started[worker]) for worker in workers]
    return Loads(
        running=np.array([len(keys) for keys in started], np.int64),
        reach=np.array([run.reach(worker) for worker in workers]),
        firsts=np.zeros(len(held), np.int64),
        # What came from elsewhere waits beside the share, so there may be more than its size.
        heads=sizes - np.array(waiting, np.int64),
        ends=sizes,
    )


def _tail(run: StepRun, prices: Prices, loads: Loads, worker: int, started: Sequence[RolloutKey]) -> Move | None:
    """All that a worker has left, to the one that runs the most of what is left, where that pays."""
    if run.can_be_stolen or not has_tail(loads, worker):
        return None
    target = fullest_tail(loads, worker, prices.token_s.size - 1)
    if target < 0 or any(run.num_moves(key) >= MAX_MOVES for key in started):
        return None
    longest = max(likely_left(run.so_far(key), run.expected(key), prices.max_tokens) for key in started)
    context = float(sum(run.num_prompt_tokens(key) + run.so_far(key) for key in started))
    freed = freed_s(longest, len(started), loads.running[target], prices.token_s, prices.prefill_s, context)
    return Move(source=worker, target=target, keys=tuple(started)) if freed > 0 else None


def _outlier(run: StepRun, prices: Prices, loads: Loads, worker: int, started: Sequence[RolloutKey]) -> Move | None:
    """The first rollout that has outgrown its worker's share and has a better place."""
    for key in started:
        num_generated = run.so_far(key)
        if run.num_moves(key) >= MAX_MOVES or num_generated < LATE * run.reach(worker):
            continue
        context = float(run.num_prompt_tokens(key) + num_generated)
        kind = _OUTLIERS[run.moving]
        target = outlier_goes_to(loads, prices, kind, worker, float(num_generated), context)
        if target >= 0:
            return Move(source=worker, target=target, keys=(key,))
    return None
