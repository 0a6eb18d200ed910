"""Chooses which running rollouts move from one worker to another one in the same step.

The rules are those of the simulator (`schedule.simulator.destinations`, `schedule.simulator.migration`).

    W workers
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from treering.engine.request import Request
from treering.engine.rollout import RolloutKey
from treering.runtime.step.step_run import StepRun
from treering.schedule.cluster import Cluster
from treering.schedule.simulator.destinations import (
    DRAIN,
    FASTER,
    Loads,
    Prices,
    fullest_tail,
    has_tail,
    outlier_goes_to,
)
from treering.schedule.simulator.migration import LATE, MAX_MOVES, freed_s, likely_left

_OUTLIERS = MappingProxyType({"faster": FASTER, "drain": DRAIN})

_NUM_LONGEST = 8
"""Rollouts of a worker that are looked at for outliers, the longest ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """What a worker has of a step."""

    requests: Mapping[RolloutKey, Request]
    """What it runs, and what waits in its engine."""
    num_awaited: int = 0
    """Rollouts that may come back to it from the judge."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Rollouts that a worker gives to another."""

    target: int
    keys: tuple[RolloutKey, ...]


def prices_of(cluster: Cluster) -> Prices:
    """What rollouts take there; to read a token again takes no less than a row more in a decode step."""
    latency = cluster.latency
    token_s = latency.token_s(cluster.num_slots)
    row_s = (token_s[-1] - token_s[1]) / max(cluster.num_slots - 1, 1)
    return Prices(token_s, max(latency.prefill_s, row_s), float(cluster.max_tokens))


def choose_move(run: StepRun, prices: Prices, held: Sequence[Held], worker: int) -> Move | None:
    """What a worker should give up now; None where everything stays.

    Args:
        run: the step, whose assignment says which moves there are.
        prices: of tokens.
        held: by worker.
        worker: that may give.

    Example: a worker with the last 2 of its 30 rollouts gives both to one that runs 9.
    """
    if run.moving == "off":
        return None
    loads = _loads(run, prices, held)
    if run.moving == "consolidate":
        return _tail(run, prices, loads, held, worker)
    return _outlier(run, prices, loads, held[worker], worker)


def _loads(run: StepRun, prices: Prices, held: Sequence[Held]) -> Loads:
    """As if every engine had started what it can: it does with its next pass."""
    workers, num_slots = range(len(held)), prices.token_s.size - 1
    sizes = np.array([run.share_size(worker) for worker in workers], np.int64)
    counts = np.array([len(each.requests) for each in held], np.int64)
    queued = np.array([run.num_queued(worker) + held[worker].num_awaited for worker in workers], np.int64)
    return Loads(
        running=np.minimum(counts, num_slots),
        reach=np.array([run.reach(worker) for worker in workers]),
        firsts=np.zeros(len(held), np.int64),
        # What came from elsewhere waits beside the share, so there may be more than its size.
        heads=sizes - queued - np.maximum(counts - num_slots, 0),
        ends=sizes,
    )


def _tail(run: StepRun, prices: Prices, loads: Loads, held: Sequence[Held], worker: int) -> Move | None:
    """All that a worker has left, to the one that runs the most of what is left, where that pays."""
    keys = tuple(held[worker].requests)
    if run.can_be_stolen or not has_tail(loads, worker) or not all(_may_go(run, held[worker], key) for key in keys):
        return None
    target = fullest_tail(loads, worker, prices.token_s.size - 1)
    if target < 0:
        return None
    longest = max(likely_left(run.so_far(key), run.expected(key), prices.max_tokens) for key in keys)
    context = float(sum(run.num_prompt_tokens(key) + run.so_far(key) for key in keys))
    freed = freed_s(longest, len(keys), loads.running[target], prices.token_s, prices.prefill_s, context)
    return Move(target=target, keys=keys) if freed > 0 else None


def _outlier(run: StepRun, prices: Prices, loads: Loads, held: Held, worker: int) -> Move | None:
    """The longest rollout that has outgrown its worker's share and has a better place."""
    late = LATE * run.reach(worker)
    outliers = [key for key in held.requests if run.so_far(key) >= late and _may_go(run, held, key)]
    for key in sorted(outliers, key=run.so_far, reverse=True)[:_NUM_LONGEST]:
        num_generated = float(run.so_far(key))
        context = run.num_prompt_tokens(key) + num_generated
        target = outlier_goes_to(loads, prices, _OUTLIERS[run.moving], worker, num_generated, context)
        if target >= 0:
            return Move(target=target, keys=(key,))
    return None


def _may_go(run: StepRun, held: Held, key: RolloutKey) -> bool:
    """Whether a rollout runs and could go on elsewhere as it would have here."""
    if not run.has_started(key) or run.num_moves(key) >= MAX_MOVES:
        return False
    # Where a later turn began is known by how the one before ended, which one that was taken out no longer says.
    request = held.requests[key]
    is_later_turn = request.so_far is not None and request.so_far.finish_reason == "stop"
    return not (is_later_turn and request.sampling.stop_strings)
