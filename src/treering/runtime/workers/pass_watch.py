"""Times each forward pass of a worker's engine, from the engine's own counters."""

import time
from collections.abc import Callable

from treering.engine.protocol import EngineStats
from treering.schedule.measured_latency import PassTimes


class PassWatch:
    """Times passes of an engine.

    A pass lasts from the end of the one before, so that messages in between count; the first one after a pause from
    its own beginning. The first one of an engine is left out: it compiles, makes room, and measures what drafts cost.

    Example: 5 passes over 3, 3, 3, 2 and 1 rows give the times of the last four.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._times = PassTimes()
        self._before = EngineStats()
        self._since_s: float | None = None
        self._is_first = True

    def note_engine(self, stats: EngineStats) -> None:
        """Takes a new engine with its counts."""
        self._before, self._since_s, self._is_first = stats, None, True

    def note_load(self, seconds: float) -> None:
        """Takes what new weights took."""
        self._times.note_load(seconds)

    def begin(self) -> None:
        """A pass begins."""
        if self._since_s is None:
            self._since_s = self._clock()

    def end(self, stats: EngineStats, *, num_unfinished: int) -> None:
        """The pass that began has ended, with these counts of the engine, and so much is left to do."""
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
        """What ran was taken out; the time until the next pass begins is nobody's."""
        self._since_s = None

    def take(self) -> PassTimes:
        """What was timed since it was taken before."""
        times, self._times = self._times, PassTimes()
        return times
