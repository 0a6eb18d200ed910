"""The rollout workers: who runs which step, what is under way where, and what becomes of it when a worker dies.

Knows requests, versions and processes. Knows nothing of rewards, training and policies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.runtime.account import Account
from treering.runtime.memory import SharedMemory
from treering.runtime.messages import Begin, Case, Give, Refresh, Sample, Sampled, WorkerSettings
from treering.runtime.moving import choose_move
from treering.runtime.process import Context, Seat
from treering.runtime.step_run import StepRun
from treering.runtime.worker import work
from treering.schedule.measured import PassTimes

Runs = Mapping[int, StepRun]
"""Steps that are being sampled, by number, in their order."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Post:
    """A worker as the controller sees it."""

    seat: Seat
    step: int = 0
    """That it has begun; 0 for a new one."""
    running: dict[RolloutKey, Request] = field(default_factory=dict)
    awaited: set[RolloutKey] = field(default_factory=set)
    """Rollouts that may come back from the judge for another turn."""
    gives_to: int | None = None
    """Worker that is to go on with what this one was asked to give up, until it has."""


class Fleet:
    """Rollout workers, each in its own step.

    A worker goes on to the next step when it has nothing left in its own and the weights are there; none waits for
    another one. Use: `dispatch` whenever something has happened, `receive` whenever a connection is ready.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        memory: SharedMemory,
        context: Context,
        *,
        num_workers: int,
        account: Account,
    ) -> None:
        """Starts the workers."""
        self._settings = settings
        self._max_batch = settings.recipe.max_batch
        self._account = account
        self._posts = [
            _Post(seat=Seat(f"rollout worker {number}", work, memory, context)) for number in range(num_workers)
        ]
        self.busy_s = 0.0
        self.times = PassTimes()
        for post in self._posts:
            post.seat.fill(settings)

    @property
    def num_workers(self) -> int:
        """Workers."""
        return len(self._posts)

    @property
    def seats(self) -> list[Seat]:
        """Where they sit."""
        return [post.seat for post in self._posts]

    def connections(self) -> list[Connection]:
        """What to wait for."""
        return [post.seat.connection for post in self._posts]

    def dispatch(self, runs: Runs, labels: Mapping[int, int]) -> None:
        """Gives every worker what it can start now.

        Args:
            runs: the steps that are open.
            labels: version -> updates behind it, of the versions that the ring has.
        """
        # Those that listen already, and have least to do, come first at what is left over.
        order = sorted(
            range(len(self._posts)), key=lambda n: (not self._posts[n].seat.is_ready, len(self._posts[n].running))
        )
        for number in order:
            post = self._posts[number]
            run = _next_run(number, post, runs)
            if run is None or run.version not in labels:
                continue
            requests = run.take(number, num_running=len(post.running), max_batch=self._max_batch)
            if not requests:
                continue
            if post.step != run.step:
                post.step = run.step
                reports = run.moving != "off"
                post.seat.send(Begin(step=run.step, version=run.version, label=labels[run.version], reports=reports))
            post.running.update((request.key, request) for request in requests)
            post.seat.send(Sample(requests=requests))
        for run in runs.values():
            self._move(run)

    def receive(self, runs: Runs) -> list[tuple[StepRun, Case]]:
        """Turns that have come from workers, each with its step; workers that have died are replaced.

        Raises:
            StateError: a worker dies again and again.
            Exception: the error that ended a worker.
        """
        found = []
        for number, post in enumerate(self._posts):
            messages, has_died = post.seat.receive()
            for message in messages:
                found += self._take(post, message, runs)
            if has_died:
                self._replace(number, post, runs)
        return found

    def note_judged(self, run: StepRun, key: RolloutKey, following: Request | None) -> None:
        """Takes what the judge has said of a turn: the request of the next one, or None where the rollout is over."""
        owner = next((number for number, post in enumerate(self._posts) if key in post.awaited), None)
        if owner is not None:
            self._posts[owner].awaited.remove(key)
        if following is not None:
            run.go_on(following, owner)

    def refresh(self) -> None:
        """Tells workers that the history has grown within the step."""
        for post in self._posts:
            post.seat.send(Refresh())

    def close(self) -> None:
        """Ends the workers."""
        for post in self._posts:
            post.seat.empty()

    def _take(self, post: _Post, message: Sampled, runs: Runs) -> list[tuple[StepRun, Case]]:
        run = runs[message.step]
        run.note_stats(message.stats)
        self.busy_s += message.busy_s
        self.times.add(message.times)
        post.seat.note_progress()
        for key, num_tokens in message.progress.items():
            run.note_progress(key, num_tokens)
        if message.given is not None:
            self._hand_on(post, message.given, run)
        found = []
        for rollout in message.rollouts:
            del post.running[rollout.key]
            case = Case(rollout=rollout, is_last_turn=run.collection.note_turn(rollout))
            if not case.is_last_turn and rollout.finish_reason == "stop":
                post.awaited.add(rollout.key)
            found.append((run, case))
        return found

    def _move(self, run: StepRun) -> None:
        """Asks a worker to give something up where that pays; one at a time in a step."""
        posts = [post if post.step == run.step else None for post in self._posts]
        if run.prices is None or any(post is not None and post.gives_to is not None for post in posts):
            return
        move = choose_move(run, run.prices, [() if post is None else tuple(post.running) for post in posts])
        if move is not None:
            source = self._posts[move.source]
            source.gives_to = move.target
            source.seat.send(Give(keys=move.keys))

    def _hand_on(self, post: _Post, given: Sequence[Rollout], run: StepRun) -> None:
        """Lets another worker go on with what one has given up; the same one, where that is in another step by now."""
        assert post.gives_to is not None, "workers give what they are asked for"
        target, post.gives_to = post.gives_to, None
        if self._posts[target].step != run.step:
            target = self._posts.index(post)
        for rollout in given:
            request = post.running.pop(rollout.key)
            before = 0 if request.so_far is None else request.so_far.num_tokens
            run.move(replace(request, so_far=rollout) if rollout.num_tokens > before else request, target)

    def _replace(self, number: int, post: _Post, runs: Runs) -> None:
        self._account.worker_deaths += 1
        post.seat.bury()
        if post.step in runs:
            runs[post.step].put_back(post.running.values())
            runs[post.step].release(number)
        self._posts[number] = _Post(seat=post.seat)
        post.seat.fill(self._settings)


def _next_run(number: int, post: _Post, runs: Runs) -> StepRun | None:
    """The step that a worker is in for as long as it has something there, else the next one with something for it."""
    if post.running or post.awaited:
        return runs.get(post.step)
    return next((run for step, run in sorted(runs.items()) if step >= post.step and run.has_work(number)), None)
