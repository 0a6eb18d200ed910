"""How a way to sample is run and timed: to the end of all its requests, by wall time, in turns with the others.

Wall time, because some ways use several threads: what other processes take counts here, for all ways alike. Knows
nothing of what is compared.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np

from benchmarks.common.timing import OnRun, interleaved_seconds, wall_seconds
from treering.engine.protocol import Engine
from treering.engine.request import Request
from treering.engine.rollout import RolloutKey
from treering.types import TokenIds

Rollouts = dict[RolloutKey, TokenIds]
"""Tokens of rollouts by their keys."""

Way = Callable[[], object]
"""Samples all rollouts once; what it returns is not looked at."""


def wall_medians(ways: Mapping[str, Way], num_runs: int, on_run: OnRun) -> dict[str, float]:
    """Median seconds of wall time of each way, all of them warm, which take turns."""
    return {name: median(seconds) for name, seconds in wall_rounds(ways, num_runs, on_run).items()}


def wall_rounds(ways: Mapping[str, Way], num_runs: int, on_run: OnRun) -> dict[str, list[float]]:
    """Seconds of wall time of each way in each round, all of them warm, which take turns."""
    steps = {name: partial(_run, way) for name, way in ways.items()}
    return interleaved_seconds(steps, num_runs, wall_seconds, on_run)


def run_all(engine: Engine, requests: Sequence[Request]) -> Rollouts:
    """Runs an idle engine until every request is finished."""
    return {rollout.key: rollout.tokens for rollout in engine.generate(requests)}


def count_tokens(rollouts: Rollouts) -> int:
    """Tokens of all rollouts together."""
    return sum(int(tokens.size) for tokens in rollouts.values())


def first_difference(tokens: TokenIds, others: TokenIds) -> int | None:
    """First position at which two rollouts differ, the end of the shorter one included; None where none does.

    Example: [5, 6, 7] and [5, 8] differ at 1, [5, 6, 7] and [5, 6] at 2.
    """
    length = min(tokens.size, others.size)
    (places,) = np.nonzero(tokens[:length] != others[:length])
    if places.size:
        return int(places[0])
    return None if tokens.size == others.size else length


def count_differing(rollouts: Rollouts, others: Rollouts) -> int:
    """Rollouts of the same keys that differ anywhere."""
    return sum(first_difference(tokens, others[key]) is not None for key, tokens in rollouts.items())


def _run(way: Way) -> None:
    way()
