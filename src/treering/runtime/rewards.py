"""Run rewards, which are user code, in their own process: the process's role, and the controller's client.

The worker does not limit its own time: the controller kills it. Rewards that repeatedly end or block their worker end
the run.
"""

import os
import time
from collections import Counter, deque

from treering.engine.protocol import RolloutKey
from treering.errors import StateError
from treering.rl.collect import RewardResult, evaluate_group, evaluate_rollout, without_reward
from treering.rl.tasks.task import Prompt, Task
from treering.runtime.account import Account
from treering.runtime.messages import Ready, Recipe, RewardReply, RewardRequest
from treering.runtime.process import Actors, RunProcess

MAX_DEATHS_OF_ONE = 3
"""Reward workers that may end during one request before its rollouts are dropped."""

MAX_IN_A_ROW = 10
"""Consecutive rollouts whose rewards end or block the worker, after which the run ends."""

NUM_RECENT = 50
"""Recent rollouts; the run also ends if half of them are such rollouts."""


class RewardWorker:
    """Role of the reward worker."""

    def __init__(self, recipe: Recipe) -> None:
        """Build the task."""
        self._task = recipe.make_task()
        self._numbers = {prompt.prompt_id: number for number, prompt in enumerate(self._task.prompts)}
        self._requests: deque[RewardRequest] = deque()
        self._is_new = True

    @property
    def is_busy(self) -> bool:
        """Whether a request is open or a message is due."""
        return self._is_new or bool(self._requests)

    def do(self, message: RewardRequest) -> None:
        """Take a request."""
        self._requests.append(message)

    def advance(self) -> list[Ready | RewardReply]:
        """Answer the oldest request."""
        if self._is_new:
            self._is_new = False
            return [Ready(pid=os.getpid())]
        request = self._requests.popleft()
        prompt = self._task.prompts[self._numbers[request.rollouts[0].prompt_id]]
        return [RewardReply(key=request.key, results=_results(self._task, prompt, request))]


def _results(task: Task, prompt: Prompt, request: RewardRequest) -> list[RewardResult]:
    if request.is_group:
        return evaluate_group(task, prompt, request.rollouts)
    [rollout] = request.rollouts
    return [evaluate_rollout(task, prompt, rollout)]


class RewardClient:
    """Client of one reward worker, which is replaced when it ends or takes too long.

    Example: a request that exceeds the time limit drops its rollouts; a new worker takes the remaining requests.
    """

    def __init__(
        self,
        recipe: Recipe,
        actors: Actors,
        *,
        reward_name: str,
        time_limit_s: float,
        worker_time_limit_s: float,
        account: Account,
    ) -> None:
        """Start the worker.

        Args:
            recipe: makes the worker's task.
            actors: starts the worker.
            reward_name: name of the reward in errors, from `Task.reward_name`.
            time_limit_s: limit for one request.
            worker_time_limit_s: limit for building the task.
            account: counts deaths.
        """
        self._recipe = recipe
        self._time_limit_s = time_limit_s
        self._account = account
        self._ended_workers = EndedWorkers(reward_name)
        self._open: deque[RewardRequest] = deque()
        self._deaths: Counter[RolloutKey] = Counter()
        self._since_s = time.perf_counter()
        self.process = RunProcess(
            "reward worker", "reward_worker", RewardWorker, actors, time_limit_s=worker_time_limit_s
        )
        self.process.start(recipe)

    def add(self, request: RewardRequest) -> None:
        """Send a request; the worker answers in order."""
        if not self._open:
            self._since_s = time.perf_counter()
        self._open.append(request)
        self.process.send(request)

    def seconds_left(self) -> float | None:
        """Return the seconds until the current request times out; None if there is none."""
        if not self._open or not self.process.is_ready:
            return None
        return max(0.0, self._since_s + self._time_limit_s - time.perf_counter())

    def receive(self) -> list[RewardReply]:
        """Return the replies that have arrived, including those for dropped rollouts.

        Replaces a worker that has died, or whose request takes too long.

        Raises:
            StateError: if reward workers repeatedly die before they are ready, or rewards repeatedly end them.
            Exception: the error that the worker raised.
        """
        was_ready = self.process.is_ready
        found, has_died = self.process.receive()
        for reply in found:
            assert reply.key == self._open[0].key, "requests are answered in order"
            self._open.popleft()
            self._ended_workers.note_answer()
        if found or self.process.is_ready != was_ready:
            self._since_s = time.perf_counter()
        if found:
            self.process.note_progress()
        # Requests have their own time limit.
        self.process.end_if_silent(is_busy=False)
        if has_died:
            found += self._note_death()
            self._start_again()
        elif self.seconds_left() == 0.0:
            found.append(self._stop())
            self._start_again()
        return found

    def close(self) -> None:
        """Stop the worker."""
        self.process.stop()

    def _note_death(self) -> list[RewardReply]:
        """Count a death; drop the request if it has ended its worker several times."""
        self._account.reward_worker_deaths += 1
        was_ready, cause = self.process.is_ready, self.process.reap()
        # A worker that died before it was ready was not ended by a request.
        if not self._open or not was_ready:
            return []
        key = self._open[0].key
        self._deaths[key] += 1
        if self._deaths[key] < MAX_DEATHS_OF_ONE:
            return []
        self.process.note_progress()
        return [self._leave_out(StateError(f"its reward ended the reward worker {self._deaths[key]} times ({cause})"))]

    def _stop(self) -> RewardReply:
        """Stop a worker whose request takes too long; return the reply for that request."""
        self._account.reward_workers_stopped += 1
        self.process.stop()
        return self._leave_out(
            TimeoutError(
                f"a reward took longer than runtime.reward_time_limit_s = {self._time_limit_s:g} s; "
                "raise the limit, or make the reward faster"
            )
        )

    def _leave_out(self, error: Exception) -> RewardReply:
        request = self._open.popleft()
        results = [without_reward(rollout, error) for rollout in request.rollouts]
        self._ended_workers.note_end(results[0].error or "")
        return RewardReply(key=request.key, results=results)

    def _start_again(self) -> None:
        """Start a new worker, and send it the open requests again."""
        self._account.evaluated_again += len(self._open)
        self._since_s = time.perf_counter()
        self.process.start(self._recipe)
        for request in self._open:
            self.process.send(request)


class EndedWorkers:
    """Counter of rollouts that were dropped because their reward ended its worker or exceeded the time limit.

    Example: ten such rollouts in a row end the run, and so do 25 of 50; one in five never does.
    """

    def __init__(self, reward_name: str) -> None:
        """Start counting; `reward_name` is the reward's name in errors."""
        self._reward_name = reward_name
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)
        self._num_in_a_row = 0

    def note_answer(self) -> None:
        """Record a reward that was answered, with a number or an error."""
        self._recent.append(False)
        self._num_in_a_row = 0

    def note_end(self, error: str) -> None:
        """Record a rollout that was dropped with this error.

        Raises:
            StateError: if there are too many.
        """
        self._recent.append(True)
        self._num_in_a_row += 1
        if self._num_in_a_row < MAX_IN_A_ROW and 2 * sum(self._recent) < NUM_RECENT:
            return
        raise StateError(
            f"{self._reward_name} ended or stopped its process for {sum(self._recent)} of the last "
            f"{len(self._recent)} rollouts, the latest: {error}; call it on such a rollout by itself and "
            "correct it, then resume with the same command"
        )
