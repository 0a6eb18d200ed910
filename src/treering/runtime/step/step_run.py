"""The state of one step while it is sampled: queues per worker, finished rollouts and the account."""

import time
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.rl.collect import Collection
from treering.rl.step_report import total_stats
from treering.runtime.account import Account
from treering.runtime.step.expectations import Expectations
from treering.runtime.step.planning import Plan
from treering.schedule.policy import Moving
from treering.schedule.simulator.destinations import Prices


class StepRun:
    """The rollouts of a step.

    Without stealing a worker's share goes out at once, so that which rollouts run side by side depends on no clock;
    with it, little more than what can run, because what waits in an engine cannot be stolen.

    Example: with 8 rollouts on 2 workers `take(0, ...)` gives the first worker's 4 in the planned order.
    """

    def __init__(
        self,
        plan: Plan,
        collection: Collection,
        *,
        version: int,
        num_workers: int,
        ratios: NDArray[np.float64],
        prices: Prices | None = None,
    ) -> None:
        """Nothing has started.

        Args:
            plan: where its rollouts run.
            collection: of them, none of which is there.
            version: steps behind the weights that sample it.
            num_workers: workers of the run.
            ratios: float64 [H] > 0: real over predicted lengths of earlier rollouts.
            prices: by which moves are judged; None moves nothing.
        """
        self.step, self.version = plan.step, version
        self.collection = collection
        requests = collection.requests()
        self.account = Account(scheduled=len(requests))
        self.stats = EngineStats()
        self.started_s = self.ended_s = 0.0
        self._number = {request.key: number for number, request in enumerate(requests)}
        believed = plan.predicted if plan.assignment.beliefs is None else plan.assignment.beliefs
        self._expectations = Expectations(
            plan.predicted,
            believed=believed,
            group_size=collection.group_size,
            ratios=ratios,
            max_tokens=collection.max_tokens,
        )
        self.moving: Moving = plan.assignment.moving if prices is not None else "off"
        self.prices = prices
        self._moves: Counter[RolloutKey] = Counter()
        self._started: set[RolloutKey] = set()
        self._num_prompt_tokens = [request.prompt.size for request in requests]
        self._can_steal = plan.assignment.stealing == "queued"
        self._queues: list[deque[Request]] = [deque() for _ in range(num_workers)]
        for number in plan.assignment.order.tolist():
            self._queues[plan.assignment.workers[number]].append(requests[number])
        self._sizes = [len(queue) for queue in self._queues]
        self._reaches = np.zeros(num_workers)
        np.maximum.at(self._reaches, plan.assignment.workers, believed)
        self._left_over: deque[Request] = deque()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R]: tokens of the rollouts, prompts in order, then samples; 1 where there is none."""
        return np.maximum(self._expectations.lengths, 1)

    @property
    def is_whole(self) -> bool:
        """Whether all rollouts have their last verdict."""
        return self.collection.num_open == 0

    def has_work(self, worker: int) -> bool:
        """Whether a worker that runs nothing of this step finds something to start."""
        can_steal = self._can_steal and self._sizes[worker] > 0 and any(self._queues)
        return bool(self._queues[worker] or self._left_over or can_steal)

    def take(self, worker: int, *, num_running: int, max_batch: int, num_spare: int = 1) -> list[Request]:
        """What a worker that runs so many rollouts starts now: its own, then what others left, then what it steals.

        Where stealing is planned, so many of its own may wait in its engine, so that no place there is ever empty.
        """
        taken: list[Request] = []
        queue, room = self._queues[worker], max_batch - num_running
        limit = room + num_spare if self._can_steal else len(queue)
        while queue and len(taken) < limit:
            taken.append(queue.popleft())
        while self._left_over and len(taken) < room:
            taken.append(self._left_over.popleft())
        while self._can_steal and self._sizes[worker] > 0 and len(taken) < room and any(self._queues):
            taken.append(self._longest().popleft())
            self.account.stolen += 1
        if taken and self.started_s == 0.0:
            self.started_s = time.perf_counter()
        return taken

    def put_back(self, requests: Iterable[Request]) -> None:
        """Takes what a worker that died was running; whoever has room samples it again, with the same tokens."""
        lost = list(requests)
        self._started.difference_update(request.key for request in lost)
        self._left_over.extend(lost)
        self.account.sampled_again += len(lost)

    def release(self, worker: int) -> None:
        """Lets every worker start what waits for a worker that died."""
        self._left_over.extend(self._queues[worker])
        self._queues[worker].clear()

    def go_on(self, request: Request, worker: int | None) -> None:
        """Takes the next turn or the rest of a rollout, for the worker that had what was before, or for any."""
        self._started.discard(request.key)
        if worker is None:
            self._left_over.append(request)
        else:
            self._queues[worker].appendleft(request)

    def note_stats(self, stats: EngineStats) -> None:
        """Adds what an engine counted for this step."""
        self.stats = total_stats([self.stats, stats])

    def note_progress(self, key: RolloutKey, num_tokens: int) -> None:
        """Takes how far a running rollout is."""
        self._started.add(key)
        self._expectations.note_progress(self._number[key], num_tokens)

    def move(self, request: Request, worker: int) -> None:
        """Takes a rollout that a worker has given up, for another one, which starts it next."""
        self._moves[request.key] += 1
        self.account.moved += 1
        self.go_on(request, worker)

    def note_over(self, rollout: Rollout) -> None:
        """Takes the length of a rollout that is over, which tells something of its siblings."""
        self._expectations.note_over(self._number[rollout.key], max(1, rollout.num_tokens))
        self.account.sampled += 1
        self.account.judged += 1
        if self.is_whole:
            self.ended_s = time.perf_counter()

    def has_started(self, key: RolloutKey) -> bool:
        """Whether a worker has said how far the rollout is since it got it."""
        return key in self._started

    def so_far(self, key: RolloutKey) -> int:
        """Tokens that a running rollout was last said to have."""
        return self._expectations.so_far(self._number[key])

    def expected(self, key: RolloutKey) -> float:
        """Length that a rollout is expected to reach."""
        return float(self._expectations.expected[self._number[key]])

    def num_moves(self, key: RolloutKey) -> int:
        """Times that a rollout was moved."""
        return self._moves[key]

    def num_prompt_tokens(self, key: RolloutKey) -> int:
        """Tokens of a rollout's prompt."""
        return self._num_prompt_tokens[self._number[key]]

    def share_size(self, worker: int) -> int:
        """Rollouts that were planned for a worker."""
        return self._sizes[worker]

    def reach(self, worker: int) -> float:
        """Longest length that was believed of a worker's share; 0 for an empty one."""
        return float(self._reaches[worker])

    def num_queued(self, worker: int) -> int:
        """Rollouts that wait for a worker here."""
        return len(self._queues[worker])

    @property
    def can_be_stolen(self) -> bool:
        """Whether something waits that any worker may start."""
        return bool(self._left_over) or (self._can_steal and any(self._queues))

    def _longest(self) -> deque[Request]:
        """The queue with the most predicted tokens."""
        return max(self._queues, key=lambda queue: sum(self.expected(each.key) for each in queue))
