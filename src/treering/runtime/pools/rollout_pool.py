"""The controller's client of the rollout workers: hands out requests and recovers those of a dead worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.runtime.account import Account
from treering.runtime.ipc.messages import Begin, Case, Give, Heard, Refresh, Sample, Sampled, WorkerSettings
from treering.runtime.ipc.process import ChildProcess, Context
from treering.runtime.ipc.shared_memory import SharedMemory
from treering.runtime.step.migration import Held, choose_move
from treering.runtime.step.step_run import StepRun
from treering.runtime.workers.rollout_worker import work
from treering.schedule.measured_latency import PassTimes

Runs = Mapping[int, StepRun]
"""Steps that are being sampled, by number, in their order."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Post:
    """A worker as the controller sees it."""

    seat: ChildProcess
    step: int = 0
    """That it is in; 0 for a new one."""
    has_begun: bool = False
    """Whether it was told so."""
    running: dict[RolloutKey, Request] = field(default_factory=dict)
    awaited: set[RolloutKey] = field(default_factory=set)
    """Rollouts that may come back from the judge for another turn."""
    gives_to: int | None = None
    """Worker that is to go on with what this one was asked to give up, until it has answered."""
    has_news: bool = False
    """Whether it has said how far it is since moves were looked for."""
    num_ended: int = 0
    """Rollouts that have come since it was last given some."""
    pace: int = 0
    """The most that came between two times of late."""

    def num_spare(self, max_batch: int) -> int:
        """Rollouts that wait in its engine: twice what ends until it hears from the controller, and a few at least."""
        return min(max(2 * self.pace, max_batch // 4, 1), max_batch)


class RolloutPool:
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
            _Post(seat=ChildProcess(f"rollout worker {number}", work, memory, context)) for number in range(num_workers)
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
    def seats(self) -> list[ChildProcess]:
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
            if post.num_ended:
                post.pace, post.num_ended = max(post.num_ended, post.pace - 1), 0
            spare = post.num_spare(self._max_batch)
            requests = run.take(number, num_running=len(post.running), max_batch=self._max_batch, num_spare=spare)
            if not requests:
                continue
            if post.step != run.step or not post.has_begun:
                post.step, post.has_begun = run.step, True
                reports = run.moving != "off"
                post.seat.send(Begin(step=run.step, version=run.version, label=labels[run.version], reports=reports))
            post.running.update((request.key, request) for request in requests)
            post.seat.send(Sample(requests=requests))
        for number, post in enumerate(self._posts):
            if post.has_news:
                post.has_news = False
                self._move(number, post, runs, labels)

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
        self.busy_s += message.busy_s
        self.times.add(message.times)
        run = runs.get(message.step)
        if message.given is not None:
            self._hand_on(post, message.given, run)
        if run is None:
            # An answer that says that nothing was left to give, behind the end of its step.
            assert not message.rollouts, "a step ends after its rollouts"
            return []
        run.note_stats(message.stats)
        self._hear(post, message.progress, run)
        if message.rollouts:
            # A report is no progress: a worker may die at the same place again and again.
            post.seat.note_progress()
        found = []
        for rollout in message.rollouts:
            del post.running[rollout.key]
            post.num_ended += 1
            case = Case(rollout=rollout, is_last_turn=run.collection.note_turn(rollout))
            if not case.is_last_turn and rollout.finish_reason == "stop":
                post.awaited.add(rollout.key)
            found.append((run, case))
        return found

    def _hear(self, post: _Post, progress: Mapping[RolloutKey, int], run: StepRun) -> None:
        if not progress:
            return
        for key, num_tokens in progress.items():
            run.note_progress(key, num_tokens)
        post.has_news = True
        post.seat.send(Heard())

    def _move(self, number: int, post: _Post, runs: Runs, labels: Mapping[int, int]) -> None:
        """Asks a worker to give something up where that pays; one at a time in a step."""
        run = runs.get(post.step)
        if run is None or run.prices is None or run.moving == "off":
            return
        if any(each.step == post.step and each.gives_to is not None for each in self._posts):
            return
        if run.moving == "consolidate" and not _is_awaited_elsewhere(number, run, runs, labels):
            return
        held = [
            Held(requests=each.running, num_awaited=len(each.awaited)) if each.step == post.step else Held(requests={})
            for each in self._posts
        ]
        move = choose_move(run, run.prices, held, number)
        if move is not None:
            post.gives_to = move.target
            post.seat.send(Give(keys=move.keys))

    def _hand_on(self, post: _Post, given: Sequence[Rollout], run: StepRun | None) -> None:
        """Lets another worker go on with what one has given up; the same one, where that is in another step by now."""
        assert post.gives_to is not None, "workers give what they are asked for"
        target, post.gives_to = post.gives_to, None
        for rollout in given:
            assert run is not None, "what was given up keeps its step open"
            request = post.running.pop(rollout.key)
            before = 0 if request.so_far is None else request.so_far.num_tokens
            if rollout.num_tokens > before:
                request = replace(request, so_far=rollout)
            if self._posts[target].step == run.step:
                run.move(request, target)
            else:
                run.go_on(request, self._posts.index(post))

    def _replace(self, number: int, post: _Post, runs: Runs) -> None:
        self._account.worker_deaths += 1
        post.seat.bury()
        if post.step in runs:
            runs[post.step].put_back(post.running.values())
            runs[post.step].release(number)
        # Where rollouts may come back from the judge, somebody has to be in their step.
        self._posts[number] = _Post(seat=post.seat, step=post.step if post.awaited else 0, awaited=post.awaited)
        post.seat.fill(self._settings)


def _next_run(number: int, post: _Post, runs: Runs) -> StepRun | None:
    """The step that a worker is in for as long as it has something there, else the next one with something for it."""
    if post.running or post.awaited:
        return runs.get(post.step)
    return next((run for step, run in sorted(runs.items()) if step >= post.step and run.has_work(number)), None)


def _is_awaited_elsewhere(number: int, run: StepRun, runs: Runs, labels: Mapping[int, int]) -> bool:
    """Whether a later step could begin on a worker, were it free."""
    return any(step > run.step and later.version in labels and later.has_work(number) for step, later in runs.items())
