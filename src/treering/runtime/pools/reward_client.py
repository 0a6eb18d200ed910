"""The controller's client of the reward worker: queue, time limit, and a spare worker that takes over after a crash.

Rewards that end or stop their worker again and again end the run.
"""

import signal
import time
from collections import Counter, deque

from treering.engine.rollout import RolloutKey
from treering.errors import StateError
from treering.rl.reward_results import without_reward
from treering.runtime.account import Account
from treering.runtime.ipc.launcher import Ended, Launcher, Recipe, Transport
from treering.runtime.ipc.messages import RewardReply, RewardRequest, RewardRequests
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.workers.reward_worker import run_reward_worker

MAX_DEATHS_OF_ONE = 3
"""Reward workers that may be killed during one request before its rollouts are left out."""

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
_LOST_STATUS = 255
"""What a fork server that has died reports for its processes."""


MAX_IN_A_ROW = 10
"""Rollouts in a row whose rewards end or stop the worker, and so the run."""


NUM_RECENT = 50
"""Half of so many recent rollouts end the run too."""


class RewardClient:
    """One reward worker and a spare, which has built its task and waits to take over when the worker ends.

    The worker gets new requests only after it has answered all earlier ones, so no pipe ever fills up.

    Example: a request that exceeds the time limit leaves its rollouts out; the spare takes the remaining requests.
    """

    def __init__(
        self,
        recipe: Recipe,
        launcher: Launcher,
        *,
        reward_name: str,
        time_limit_s: float,
        worker_time_limit_s: float,
        account: Account,
    ) -> None:
        """Starts both workers.

        Args:
            recipe: makes the task of the workers.
            launcher: starts them.
            reward_name: see `Task.reward_name`.
            time_limit_s: for one request.
            worker_time_limit_s: to build the task.
            account: counts deaths.
        """
        self._recipe = recipe
        self._time_limit_s = time_limit_s
        self._account = account
        self._ended_workers = EndedWorkers(reward_name)
        self._waiting: deque[RewardRequest] = deque()
        self._given: deque[RewardRequest] = deque()
        self._deaths: Counter[RolloutKey] = Counter()
        self._since_s = time.perf_counter()
        self.child, self.spare = (
            ChildProcess(
                name,
                "reward_worker",
                run_reward_worker,
                launcher,
                time_limit_s=worker_time_limit_s,
                leads_group=True,
            )
            for name in ("reward worker", "spare reward worker")
        )
        self.child.start(recipe)
        self.spare.start(recipe)

    def connections(self) -> list[Transport]:
        """Connections to wait for."""
        return [self.child.connection, self.spare.connection]

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
        """Replies that have arrived, including those for rollouts that are left out. Replaces dead workers.

        Raises:
            StateError: reward workers die repeatedly before they are ready, or rewards end them again and again.
            Exception: the error that a worker raised.
        """
        was_ready = self.child.is_ready
        found, has_died = self.child.receive()
        for reply in found:
            assert reply.key == self._given[0].key, "requests are answered in order"
            self._given.popleft()
            self._ended_workers.note_answer()
        if found or self.child.is_ready != was_ready:
            self._since_s = time.perf_counter()
        if found:
            self.child.note_progress()
        # Its requests have a time limit of their own.
        self.child.end_if_silent(is_busy=False)
        self._check_spare()
        if has_died:
            found += self._replace()
        return found

    def check_time(self) -> list[RewardReply]:
        """Replaces a worker whose request timed out; returns the reply for that request, if any.

        Raises:
            StateError: too many rewards have ended or stopped their worker.
        """
        if self.seconds_left() != 0.0:
            return []
        self._account.reward_workers_stopped += 1
        self.child.stop()
        result = self._leave_out(
            TimeoutError(
                f"a reward may take runtime.reward_time_limit_s = {self._time_limit_s:g} s, and this one took longer; "
                "raise the limit, or speed the reward up"
            )
        )
        self._take_over()
        return [result]

    def close(self) -> None:
        """Stops both workers."""
        self.child.stop()
        self.spare.stop()

    def _check_spare(self) -> None:
        _, has_died = self.spare.receive()
        self.spare.end_if_silent(is_busy=False)
        if self.spare.is_ready:
            self.spare.note_progress()
        if has_died:
            self._account.reward_worker_deaths += 1
            self.spare.reap()
            self.spare.start(self._recipe)

    def _replace(self) -> list[RewardReply]:
        was_ready = self.child.is_ready
        self._account.reward_worker_deaths += 1
        ended = self.child.reap()
        found = []
        # A worker that died before it was ready was not ended by a request.
        if self._given and was_ready:
            found = self._count_death(self._given[0].key, ended)
        self._take_over()
        return found

    def _count_death(self, key: RolloutKey, ended: Ended) -> list[RewardReply]:
        """Leaves out what ended its worker, or during which workers were killed several times."""
        self._deaths[key] += 1
        if not _is_own_doing(ended.status) and self._deaths[key] < MAX_DEATHS_OF_ONE:
            return []
        self.child.note_progress()
        again = f", {self._deaths[key]} times" if self._deaths[key] > 1 else ""
        return [self._leave_out(StateError(f"its reward ended the reward worker ({ended.cause}){again}"))]

    def _leave_out(self, error: Exception) -> RewardReply:
        request = self._given.popleft()
        results = [without_reward(rollout, error) for rollout in request.rollouts]
        self._ended_workers.note_end(results[0].error or "")
        return RewardReply(key=request.key, results=results)

    def _take_over(self) -> None:
        """Makes the spare the worker, sends it the open requests again, and starts a new spare."""
        self._account.evaluated_again += len(self._given)
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
        self.child, self.spare = self.spare, self.child
        self.child.name, self.spare.name = self.spare.name, self.child.name
        self.child.num_deaths = self.spare.num_deaths
        self.spare.start(self._recipe)


def _is_own_doing(status: int | None) -> bool:
    """Whether a worker has exited or crashed, rather than been killed from outside, by memory limits for example."""
    if status is None or status == _LOST_STATUS:
        return False
    return status >= 0 or -status in _CRASHES


class EndedWorkers:
    """Counts the rollouts that were left out because their reward ended its worker or exceeded the time limit.

    Example: ten such rollouts one after another end the run, and so do 25 among 50; one in five never does.
    """

    def __init__(self, reward_name: str) -> None:
        """`reward_name`: see `Task.reward_name`."""
        self._reward_name = reward_name
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)
        self._num_in_a_row = 0

    def note_answer(self) -> None:
        """Notes a reward that was answered, with a number or an error."""
        self._recent.append(False)
        self._num_in_a_row = 0

    def note_end(self, error: str) -> None:
        """Notes a rollout that was left out with this error.

        Raises:
            StateError: it is one too many.
        """
        self._recent.append(True)
        self._num_in_a_row += 1
        if self._num_in_a_row < MAX_IN_A_ROW and 2 * sum(self._recent) < NUM_RECENT:
            return
        raise StateError(
            f"rewards return, and {self._reward_name} ended or stopped its process for {sum(self._recent)} of the "
            f"last {len(self._recent)} rollouts, the latest being {error}; call it on such a rollout by itself and "
            "correct it, then resume with the same command"
        )
