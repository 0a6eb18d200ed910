"""Ways to sample all requests, timed by wall time, in turns, each with the number of threads that is best for it.

Wall time, because some ways use several threads: what other processes take counts here, for all ways alike.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.common.timing import OnRun, interleaved_seconds, wall_seconds
from treering.engine.protocol import Engine, Request, RolloutKey
from treering.train.loop.compute import num_threads as threads
from treering.types import TokenIds

Rollouts = dict[RolloutKey, TokenIds]
"""Tokens of rollouts by their keys."""

Way = Callable[[], object]
"""Samples all rollouts once; its result is ignored."""

MAX_THREADS = 8


class Best(NamedTuple):
    """A way with the number of threads that it is fastest with."""

    num_threads: int
    seconds: list[float]
    """Seconds of each round."""

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def thread_counts() -> list[int]:
    """Numbers of threads that are tried: powers of two, as far as there are processors."""
    num_processors = os.cpu_count() or 1
    return [count for count in (1, 2, 4, MAX_THREADS) if count <= num_processors]


def fastest(ways: Mapping[tuple[str, int], Way], num_runs: int, on_run: OnRun) -> dict[str, Best]:
    """Return the number of threads with the best median for each way; ways and numbers take turns.

    All ways are expected to be warm.

    Raises:
        InputError: fewer than one run.
    """
    steps = {f"{name} {count}": partial(with_threads, count, way) for (name, count), way in ways.items()}
    rounds = interleaved_seconds(steps, num_runs, wall_seconds, on_run)
    best: dict[str, Best] = {}
    for name, count in ways:
        found = Best(count, rounds[f"{name} {count}"])
        if name not in best or found.median_s < best[name].median_s:
            best[name] = found
    return best


def with_threads(num_threads: int, way: Way) -> None:
    """Runs a way with torch on `num_threads` threads."""
    with threads(num_threads):
        way()


def run_all(engine: Engine, requests: Sequence[Request]) -> Rollouts:
    """Runs an idle engine until every request is finished."""
    return {rollout.key: rollout.tokens for rollout in engine.generate(requests)}


def count_tokens(rollouts: Rollouts) -> int:
    """Tokens of all rollouts together."""
    return sum(int(tokens.size) for tokens in rollouts.values())


def count_differing(rollouts: Rollouts, others: Rollouts) -> int:
    """Rollouts of the same keys that differ anywhere."""
    return sum(not np.array_equal(tokens, others[key]) for key, tokens in rollouts.items())
