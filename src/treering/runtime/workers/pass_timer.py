"""Times each forward pass of a worker's engine, from the engine's own counters."""

import time
from collections.abc import Callable

from treering.engine.protocol import EngineStats
from treering.schedule.measured_latency import PassTimes


class PassTimer:
    """Times the forward passes of an engine.

    A pass is timed from the end of the previous one, so that message handling counts; after a pause, from its own
    start. An engine's first pass is left out: it compiles, allocates, and measures draft costs.

    Example: 5 passes over 3, 3, 3, 2 and 1 rows record the times of the last four.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._times = PassTimes()
        self._before = EngineStats()
        self._since_s: float | None = None
        self._is_first = True

    def note_engine(self, stats: EngineStats) -> None:
        """Starts timing a new engine with these counts."""
        self._before, self._since_s, self._is_first = stats, None, True

    def note_load(self, seconds: float) -> None:
        """Records the time of a weight load."""
        self._times.note_load(seconds)

    def begin(self) -> None:
        """Marks the start of a pass."""
        if self._since_s is None:
            self._since_s = self._clock()

    def end(self, stats: EngineStats, *, num_unfinished: int) -> None:
        """Marks the end of a pass, with the engine's counts and unfinished requests."""
        assert self._since_s is not None, "a pass begins before it ends"
        now_s = self._clock()
        before, seconds = self._before, now_s - self._since_s
        self._before = stats
        self._since_s = now_s if num_unfinished else None
        if stats.num_forwards == before.num_forwards:
            return
        if self._is_first:
            self._is_first = False
            return
        self._times.note_pass(
            seconds,
            num_rows=stats.num_rows - before.num_rows,
            num_prefilled=stats.num_prefilled - before.num_prefilled,
            num_sampled=stats.num_sampled - before.num_sampled,
            num_passes=stats.num_forwards - before.num_forwards,
        )

    def pause(self) -> None:
        """Leaves out the time until the next pass, because all running rollouts were removed."""
        self._since_s = None

    def take(self) -> PassTimes:
        """The times since the previous call."""
        times, self._times = self._times, PassTimes()
        return times
