"""The controller's client of the reward worker: queue, time limit, and restart after a crash."""

import time
from collections import Counter, deque
from multiprocessing.connection import Connection

from treering.engine.rollout import RolloutKey
from treering.errors import StateError
from treering.rl.turns import without_reward
from treering.runtime.account import Account
from treering.runtime.ipc.messages import RewardReply, RewardRequest, RewardRequests, RewardSettings
from treering.runtime.ipc.process import ChildProcess, Context
from treering.runtime.ipc.shared_memory import SharedMemory
from treering.runtime.workers.reward_worker import run_reward_worker

MAX_DEATHS_OF_ONE = 3
"""Reward workers that one rollout may kill before it is left out."""


class RewardClient:
    """One reward worker. It gets new requests only after it has answered all earlier ones, so no pipe ever fills up.

    Example: a request that exceeds the time limit leaves its rollout out; a new worker takes the remaining requests.
    """

    def __init__(
        self,
        settings: RewardSettings,
        memory: SharedMemory,
        context: Context,
        *,
        time_limit_s: float,
        account: Account,
    ) -> None:
        """Starts the reward worker; `time_limit_s` is for one request."""
        self._settings = settings
        self._time_limit_s = time_limit_s
        self._account = account
        self._waiting: deque[RewardRequest] = deque()
        self._given: deque[RewardRequest] = deque()
        self._deaths: Counter[RolloutKey] = Counter()
        self._since_s = time.perf_counter()
        self.child = ChildProcess("reward worker", run_reward_worker, memory, context)
        self.child.start(settings)

    def connections(self) -> list[Connection]:
        """Connections to wait for."""
        return [self.child.connection]

    def add(self, request: RewardRequest) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def dispatch(self) -> None:
        """Sends all queued requests to an idle worker."""
        if self._given or not self._waiting:
            return
        self._given, self._waiting = self._waiting, deque()
        self._since_s = time.perf_counter()
        self.child.send(RewardRequests(requests=list(self._given)))

    def seconds_left(self) -> float | None:
        """Seconds until the current request times out; None if there is none."""
        if not self._given or not self.child.is_ready:
            return None
        return max(0.0, self._since_s + self._time_limit_s - time.perf_counter())

    def receive(self) -> list[RewardReply]:
        """Replies that have arrived, including those for rollouts that are left out. Replaces a dead worker.

        Raises:
            StateError: reward workers die repeatedly, whatever the rollout.
            Exception: the error that the worker raised.
        """
        was_ready = self.child.is_ready
        found, has_died = self.child.receive()
        for reply in found:
            assert reply.key == self._given[0].rollout.key, "requests are answered in order"
            self._given.popleft()
        if found or self.child.is_ready != was_ready:
            self._since_s = time.perf_counter()
        if found:
            self.child.note_progress()
        if has_died:
            found += self._replace()
        return found

    def check_time(self) -> list[RewardReply]:
        """Replaces a worker whose request timed out; returns the reply for that request, if any."""
        if self.seconds_left() != 0.0:
            return []
        error = TimeoutError(
            f"a reward may take runtime.reward_time_limit_s = {self._time_limit_s:g} s, and this one took longer; "
            "raise the limit, or speed the reward up"
        )
        self._account.reward_workers_stopped += 1
        self.child.stop()
        result = self._give_up(error)
        self._restart()
        return [result]

    def close(self) -> None:
        """Stops the reward worker."""
        self.child.stop()

    def _replace(self) -> list[RewardReply]:
        was_ready = self.child.is_ready
        self._account.reward_worker_deaths += 1
        self.child.reap()
        found = []
        # A worker that died before it was ready was not killed by a request.
        if self._given and was_ready:
            found = self._count_death(self._given[0])
        self._restart()
        return found

    def _count_death(self, request: RewardRequest) -> list[RewardReply]:
        self._deaths[request.rollout.key] += 1
        if self._deaths[request.rollout.key] < MAX_DEATHS_OF_ONE:
            return []
        self.child.note_progress()
        return [self._give_up(StateError(f"its reward ended the reward worker {MAX_DEATHS_OF_ONE} times"))]

    def _give_up(self, error: Exception) -> RewardReply:
        rollout = self._given.popleft().rollout
        return RewardReply(key=rollout.key, result=without_reward(rollout, error))

    def _restart(self) -> None:
        self._account.evaluated_again += len(self._given)
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
        self.child.start(self._settings)
