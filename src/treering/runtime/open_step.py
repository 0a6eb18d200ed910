"""Track a step while it is sampled: its queues, and its expected rollout lengths, updated as siblings finish.

Shapes: R rollouts of a step, prompts in order, then samples.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from treering.engine.protocol import EngineStats, RolloutKey
from treering.rl.collect import Collection
from treering.rl.environments.collect_episodes import EpisodeCollection
from treering.rl.step_report import WorkerSpan, total_stats
from treering.runtime.account import Account
from treering.runtime.messages import Work
from treering.runtime.scheduling import StepAssignment
from treering.schedule.migration import Prices
from treering.schedule.policy import Moving
from treering.schedule.predict import expected_lengths
from treering.schedule.turns import Turns


class ExpectedLengths:
    """Expected lengths of a step's rollouts; a group's are updated when one of its rollouts finishes.

    Example: four rollouts of a group have 100 predicted tokens each, and two finish with 300 and 320: the expected
    lengths of the others rise above 100.
    """

    def __init__(
        self,
        predicted: NDArray[np.float64],
        *,
        initial: NDArray[np.float64],
        group_size: int,
        ratios: NDArray[np.float64],
        max_tokens: int,
    ) -> None:
        """Start before the first rollout.

        Args:
            predicted: float64 [R] > 0, the predictor's lengths.
            initial: float64 [R] > 0, expected lengths until a sibling finishes.
            group_size: rollouts per prompt.
            ratios: float64 [H] > 0, actual over predicted lengths of earlier rollouts.
            max_tokens: most tokens of a rollout.
        """
        self._predicted = predicted
        self._group_size = group_size
        self._ratios = ratios
        self._max_tokens = max_tokens
        self._lengths = np.zeros(predicted.size, np.int64)
        self._so_far = np.zeros(predicted.size, np.int64)
        self._expected = initial.copy()
        self._stale: set[int] = set()

    @property
    def expected(self) -> NDArray[np.float64]:
        """float64 [R]; finished rollouts keep their last value.

        Computed lazily, because most runs move and steal little and one group takes 0.5 ms.
        """
        while self._stale:
            self._update_group(self._stale.pop())
        return self._expected

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R], lengths of finished rollouts, 0 for the others."""
        return self._lengths

    def so_far(self, number: int) -> int:
        """Return the tokens that a rollout had at its last report."""
        return int(self._so_far[number])

    def note_progress(self, number: int, num_tokens: int) -> None:
        """Record the tokens of a running rollout."""
        self._so_far[number] = num_tokens

    def note_finished(self, number: int, length: int) -> None:
        """Record the length of a finished rollout, at least 1, and update its siblings."""
        self._lengths[number] = length
        self._stale.add(number - number % self._group_size)

    def _update_group(self, first: int) -> None:
        """Recompute the expected lengths of a group's unfinished rollouts."""
        group = slice(first, first + self._group_size)
        is_open = self._lengths[group] == 0
        if not is_open.any():
            return
        self._expected[group][is_open] = expected_lengths(
            self._so_far[group][is_open],
            self._lengths[group][~is_open],
            predicted=float(self._predicted[group].mean()),
            ratios=self._ratios,
            max_tokens=self._max_tokens,
        )


class OpenStep:
    """Rollouts of a step while it is sampled.

    Without stealing, a worker gets its whole share at once, so that batches do not depend on a clock. With stealing, it
    gets little more than it can run, because requests queued in an engine cannot be stolen.

    Example: with 8 rollouts on 2 workers, `take(0, ...)` returns the first worker's 4 requests in their scheduled
    order.
    """

    def __init__(
        self,
        assigned: StepAssignment,
        collection: Collection | EpisodeCollection,
        *,
        version: int,
        num_workers: int,
        ratios: NDArray[np.float64],
        prices: Prices | None = None,
    ) -> None:
        """Start before the first rollout.

        Args:
            assigned: which worker runs each rollout.
            collection: the step's collection, still empty.
            version: the step whose weights sample it.
            num_workers: workers of the run.
            ratios: float64 [H] > 0, actual over predicted lengths of earlier rollouts.
            prices: token times that decide moves; None disables moves.
        """
        self.step, self.version = assigned.step, version
        self.collection = collection
        requests: list[Work] = [*collection.requests()]
        self.account = Account(scheduled=len(requests))
        self.stats = EngineStats()
        self.started_s = self.ended_s = 0.0
        self.spans: dict[int, WorkerSpan] = {}
        self._number = {request.key: number for number, request in enumerate(requests)}
        corrected = assigned.assignment.predicted_lengths
        initial = assigned.predicted if corrected is None else corrected
        self._expected_lengths = ExpectedLengths(
            assigned.predicted,
            initial=initial,
            group_size=collection.group_size,
            ratios=ratios,
            max_tokens=collection.max_tokens,
        )
        self.moving: Moving = assigned.assignment.moving if prices is not None else "off"
        self.prices = prices
        self._moves: Counter[RolloutKey] = Counter()
        self._started: set[RolloutKey] = set()
        self._num_prompt_tokens = [request.prompt.size for request in requests]
        self._can_steal = assigned.assignment.stealing == "queued"
        self._queues: list[deque[Work]] = [deque() for _ in range(num_workers)]
        for number in assigned.assignment.order.tolist():
            self._queues[assigned.assignment.workers[number]].append(requests[number])
        self._sizes = [len(queue) for queue in self._queues]
        self._reaches = np.zeros(num_workers)
        np.maximum.at(self._reaches, assigned.assignment.workers, initial)
        self._unassigned: deque[Work] = deque()

    @property
    def rollouts(self) -> Collection:
        """The collection of a step of prompts."""
        assert isinstance(self.collection, Collection), "episodes have runs"
        return self.collection

    @property
    def runs(self) -> EpisodeCollection:
        """The collection of a step of episodes."""
        assert isinstance(self.collection, EpisodeCollection), "prompts have rollouts"
        return self.collection

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R], tokens of the rollouts, at least 1; prompts in order, then samples."""
        return np.maximum(self._expected_lengths.lengths, 1)

    @property
    def turns(self) -> Turns | None:
        """Turns and waits of an environment's episodes; None for a step of prompts."""
        return self.collection.turns() if isinstance(self.collection, EpisodeCollection) else None

    @property
    def is_complete(self) -> bool:
        """Whether all rollouts have their final reward result."""
        return self.collection.num_open == 0

    def has_work(self, worker: int) -> bool:
        """Return whether a worker that runs nothing of this step could start a rollout."""
        can_steal = self._can_steal and self._sizes[worker] > 0 and any(self._queues)
        return bool(self._queues[worker] or self._unassigned or can_steal)

    def take(self, worker: int, *, num_running: int, max_batch: int, num_spare: int = 1) -> list[Work]:
        """Return requests for a worker that runs `num_running` rollouts: its own, then unassigned, then stolen ones.

        With stealing, `num_spare` of its own requests may queue in its engine, so that its slots never run empty.
        """
        taken: list[Work] = []
        queue, num_free = self._queues[worker], max_batch - num_running
        limit = num_free + num_spare if self._can_steal else len(queue)
        while queue and len(taken) < limit:
            taken.append(queue.popleft())
        while self._unassigned and len(taken) < num_free:
            taken.append(self._unassigned.popleft())
        while self._can_steal and self._sizes[worker] > 0 and len(taken) < num_free and any(self._queues):
            taken.append(self._longest().popleft())
            self.account.stolen += 1
        if taken and self.started_s == 0.0:
            self.started_s = time.perf_counter()
        return taken

    def requeue(self, requests: Iterable[Work]) -> None:
        """Take back the requests of a dead worker; any worker samples them again, with the same tokens."""
        lost = list(requests)
        self._started.difference_update(request.key for request in lost)
        self._unassigned.extend(lost)
        self.account.sampled_again += len(lost)

    def release(self, worker: int) -> None:
        """Let every worker start the queued requests of a dead worker."""
        self._unassigned.extend(self._queues[worker])
        self._queues[worker].clear()

    def resume(self, request: Work, worker: int | None) -> None:
        """Queue the next turn or the rest of a rollout, for the given worker or for any."""
        self._started.discard(request.key)
        if worker is None:
            self._unassigned.append(request)
        else:
            self._queues[worker].appendleft(request)

    def note_stats(self, stats: EngineStats) -> None:
        """Add an engine's counts for this step."""
        self.stats = total_stats([self.stats, stats])

    def note_span(self, worker: int, *, busy_s: float, num_rollouts: int) -> None:
        """Record that a worker was busy for `busy_s` until now and ended `num_rollouts` there."""
        if busy_s == 0.0 and num_rollouts == 0:
            return
        now = time.time()
        before = self.spans.get(worker)
        self.spans[worker] = WorkerSpan(
            worker=worker,
            started_s=now - busy_s if before is None else before.started_s,
            ended_s=now,
            busy_s=busy_s + (0.0 if before is None else before.busy_s),
            num_rollouts=num_rollouts + (0 if before is None else before.num_rollouts),
        )

    def note_progress(self, key: RolloutKey, num_tokens: int) -> None:
        """Record the tokens of a running rollout."""
        self._started.add(key)
        self._expected_lengths.note_progress(self._number[key], num_tokens)

    def move(self, request: Work, worker: int) -> None:
        """Queue a given-up rollout for another worker, ahead of its other requests."""
        self._moves[request.key] += 1
        self.account.moved += 1
        self.resume(request, worker)

    def note_finished(self, key: RolloutKey, num_tokens: int) -> None:
        """Record a finished rollout or run, with its sampled tokens."""
        length = min(max(1, num_tokens), self.collection.max_tokens)
        self._expected_lengths.note_finished(self._number[key], length)
        self.account.sampled += 1

    def note_rewarded(self, num_rollouts: int) -> None:
        """Record that finished rollouts have their final reward result."""
        self.account.evaluated += num_rollouts
        if self.is_complete:
            self.ended_s = time.perf_counter()

    def has_started(self, key: RolloutKey) -> bool:
        """Return whether its worker has reported progress of the rollout."""
        return key in self._started

    def so_far(self, key: RolloutKey) -> int:
        """Return the tokens that a running rollout had at its last report."""
        return self._expected_lengths.so_far(self._number[key])

    def expected(self, key: RolloutKey) -> float:
        """Return the expected final length of a rollout."""
        return float(self._expected_lengths.expected[self._number[key]])

    def num_moves(self, key: RolloutKey) -> int:
        """Return how often a rollout was moved."""
        return self._moves[key]

    def num_prompt_tokens(self, key: RolloutKey) -> int:
        """Return the number of tokens in a rollout's prompt."""
        return self._num_prompt_tokens[self._number[key]]

    def share_size(self, worker: int) -> int:
        """Return the number of rollouts assigned to a worker."""
        return self._sizes[worker]

    def reach(self, worker: int) -> float:
        """Return the longest expected length in a worker's share at the start of the step; 0 if it is empty."""
        return float(self._reaches[worker])

    def num_queued(self, worker: int) -> int:
        """Return the number of requests queued here for a worker."""
        return len(self._queues[worker])

    @property
    def can_be_stolen(self) -> bool:
        """Whether a queued request could start on any worker."""
        return bool(self._unassigned) or (self._can_steal and any(self._queues))

    def _longest(self) -> deque[Work]:
        """Return the queue with the most expected tokens."""
        return max(self._queues, key=lambda queue: sum(self.expected(each.key) for each in queue))
