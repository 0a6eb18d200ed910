"""Rows of one engine step, as the drafter gets them: rollouts side by side, each as far as it was replayed.

Knows rows, what was emitted, and which rollout comes next. Knows nothing of what history holds.
"""

import time

import numpy as np

from benchmarks.draft.histories import Plan
from benchmarks.draft.recording import Recording
from benchmarks.draft.replay import OnDone, Tally, add_steps, agreement, emitted
from treering import Drafter
from treering.arrays import Int64Array
from treering.history.types import DraftRows


class Lanes:
    """Rows that go through some of a plan's rollouts, the next free row taking the next rollout."""

    def __init__(
        self, recording: Recording, plan: Plan, numbers: range, num_lanes: int, groups: Int64Array | None = None
    ) -> None:
        """Groups are int64 [K], equal for siblings; None where each rollout runs by itself."""
        self._recording = recording
        self._plan = plan
        self._groups = np.arange(plan.order.size) if groups is None else groups
        self._end = numbers.stop
        self._waiting = iter(numbers)
        rollouts = plan.order[numbers.start : numbers.stop]
        longest = int((recording.offsets[rollouts + 1] - recording.offsets[rollouts]).max())
        size = min(num_lanes, len(numbers))
        self._buffer = np.zeros((size, longest), np.int32)
        self._numbers, self._places = np.empty(size, np.int64), np.empty(size, np.int64)
        self._num_busy = size
        for lane in range(size):
            self._take(lane, next(self._waiting))

    def run(self, drafter: Drafter, tally: Tally, on_done: OnDone) -> None:
        """Steps until no rollout is left."""
        while self._num_busy:
            rows = self._rows()
            since = time.thread_time_ns()
            drafts = drafter.propose(rows)
            tally.add_time((time.thread_time_ns() - since) / 1e3, self._num_busy)
            places = self._places[: self._num_busy].copy()
            accepted, leaves = agreement(self._recording, places, drafts.tokens, drafts.offsets, drafts.parents)
            num_emitted, _ = emitted(self._recording, places, accepted)
            if drafts.tokens.size:
                # A run ends by its policy's choice: what was drafted behind its end was wrong, as a token would be.
                drafter.observe(rows, accepted, leaves=leaves)
            add_steps(tally, num_emitted, accepted, drafts.tokens.size)
            self._move(num_emitted)
            on_done(int(self._numbers[: self._num_busy].min(initial=self._end)) / self._plan.order.size)

    def _rows(self) -> DraftRows:
        busy = slice(0, self._num_busy)
        numbers = self._numbers[busy].copy()
        rollouts = self._plan.order[numbers]
        begins = self._recording.offsets[rollouts]
        return DraftRows(
            prompt_ids=self._plan.prompts[numbers].tolist(),
            groups=self._groups[numbers],
            tokens=self._buffer[busy],
            num_tokens=self._places[busy] - begins,
            num_prompt_tokens=self._recording.starts[rollouts] - begins,
            max_drafts=np.full(numbers.size, np.iinfo(np.int64).max // 2, np.int64),
            row_ids=numbers,
        )

    def _move(self, num_emitted: Int64Array) -> None:
        """Appends what was emitted and what is given behind it; from the back, so that a freed row can be filled."""
        ends = self._recording.offsets[self._plan.order[self._numbers[: self._num_busy]] + 1]
        behind = self._places[: self._num_busy] + num_emitted
        for lane in range(behind.size - 1, -1, -1):
            place = int(self._recording.nexts[behind[lane]]) if behind[lane] < ends[lane] else int(ends[lane])
            self._places[lane] = place
            if place == ends[lane]:
                self._refill(lane)

    def _refill(self, lane: int) -> None:
        number = next(self._waiting, None)
        if number is not None:
            self._take(lane, number)
            return
        last = self._num_busy = self._num_busy - 1
        self._buffer[lane] = self._buffer[last]
        self._numbers[lane], self._places[lane] = self._numbers[last], self._places[last]

    def _take(self, lane: int, number: int) -> None:
        rollout = int(self._plan.order[number])
        begin, end = self._recording.offsets[rollout : rollout + 2].tolist()
        # The whole rollout at once: what stands behind a row's count is not read.
        self._buffer[lane, : end - begin] = self._recording.tokens[begin:end]
        self._numbers[lane], self._places[lane] = number, self._recording.starts[rollout]
