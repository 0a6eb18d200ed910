"""One step while it is sampled: what waits for which worker, what has come in, and its account.

Knows requests and queues. Knows nothing of processes, of weights and of other steps.
"""

import time
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.rollout import Rollout
from treering.rl.collect import Collection
from treering.rl.step_report import total_stats
from treering.runtime.account import Account
from treering.runtime.planning import Plan


class StepRun:
    """The rollouts of a step.

    Without stealing a worker's share goes out at once, so that which rollouts run side by side depends on no clock;
    with it, little more than what can run, because what waits in an engine cannot be stolen.

    Example: with 8 rollouts on 2 workers `take(0, ...)` gives the first worker's 4 in the planned order.
    """

    def __init__(self, plan: Plan, collection: Collection, *, version: int, num_workers: int) -> None:
        """`version`: steps behind the weights that sample it."""
        self.step, self.version = plan.step, version
        self.collection = collection
        requests = collection.requests()
        self.account = Account(scheduled=len(requests))
        self.stats = EngineStats()
        self.started_s = self.ended_s = 0.0
        self._number = {request.key: number for number, request in enumerate(requests)}
        beliefs = plan.assignment.beliefs
        self._beliefs = plan.predicted if beliefs is None else beliefs
        self._lengths = np.ones(len(requests), np.int64)
        self._can_steal = plan.assignment.stealing == "queued"
        self._queues: list[deque[Request]] = [deque() for _ in range(num_workers)]
        for number in plan.assignment.order.tolist():
            self._queues[plan.assignment.workers[number]].append(requests[number])
        self._shares = {worker for worker, queue in enumerate(self._queues) if queue}
        self._left_over: deque[Request] = deque()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R]: tokens of the rollouts, prompts in order, then samples; 1 where there is none."""
        return self._lengths

    @property
    def is_whole(self) -> bool:
        """Whether all rollouts have their last verdict."""
        return self.collection.num_open == 0

    def has_work(self, worker: int) -> bool:
        """Whether a worker that runs nothing of this step finds something to start."""
        can_steal = self._can_steal and worker in self._shares and any(self._queues)
        return bool(self._queues[worker] or self._left_over or can_steal)

    def take(self, worker: int, *, num_running: int, max_batch: int) -> list[Request]:
        """What a worker that runs so many rollouts starts now: its own, then what others left, then what it steals."""
        taken: list[Request] = []
        queue, room = self._queues[worker], max_batch - num_running
        limit = room + max(1, max_batch // 4) if self._can_steal else len(queue)
        while queue and len(taken) < limit:
            taken.append(queue.popleft())
        while self._left_over and len(taken) < room:
            taken.append(self._left_over.popleft())
        while self._can_steal and worker in self._shares and len(taken) < room and any(self._queues):
            taken.append(self._longest().popleft())
            self.account.stolen += 1
        if taken and self.started_s == 0.0:
            self.started_s = time.perf_counter()
        return taken

    def put_back(self, requests: Iterable[Request]) -> None:
        """Takes what a worker that died was running; whoever has room samples it again, with the same tokens."""
        lost = list(requests)
        self._left_over.extend(lost)
        self.account.sampled_again += len(lost)

    def release(self, worker: int) -> None:
        """Lets every worker start what waits for a worker that died."""
        self._left_over.extend(self._queues[worker])
        self._queues[worker].clear()

    def go_on(self, request: Request, worker: int | None) -> None:
        """Takes the next turn of a rollout, for the worker that had the one before, or for any."""
        if worker is None:
            self._left_over.append(request)
        else:
            self._queues[worker].appendleft(request)

    def note_stats(self, stats: EngineStats) -> None:
        """Adds what an engine counted for this step."""
        self.stats = total_stats([self.stats, stats])

    def note_over(self, rollout: Rollout) -> None:
        """Takes the length of a rollout that is over."""
        self._lengths[self._number[rollout.key]] = max(1, rollout.num_tokens)
        self.account.sampled += 1
        self.account.judged += 1
        if self.is_whole:
            self.ended_s = time.perf_counter()

    def _longest(self) -> deque[Request]:
        """The queue with the most predicted tokens."""
        return max(self._queues, key=lambda queue: sum(self._beliefs[self._number[each.key]] for each in queue))
