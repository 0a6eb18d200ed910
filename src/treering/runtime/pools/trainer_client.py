"""The controller's client of the trainer and its ranks: sends steps, and replays them after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from treering.rl.collect import Group
from treering.runtime.account import Account
from treering.runtime.ipc.launcher import Launcher, Transport, wait_for_any
from treering.runtime.ipc.messages import FetchState, Rendezvous, TrainedStep, TrainerSettings, TrainerState, TrainStep
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.ipc.weight_store import BASE, IncomingWeights, PublishedWeights, WeightStore
from treering.runtime.workers.trainer_worker import run_trainer

_TOKEN_BYTES = 25
"""Per token of a rollout: its id, two log-probabilities, a mask and a version."""

_LEAST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """A step that the trainer received after its base, with the size of its rollouts."""

    message: TrainStep
    num_bytes: int


class TrainerClient:
    """One trainer, of one or several ranks.

    Its base is the last fetched state: weights in an extra slot of the store, the optimiser as bytes. The rollouts of
    later steps are kept. After a crash, a new trainer replays them and gets bitwise the same weights. Once they need
    more memory than the base, a new base replaces them.

    Example: with the base at step 4, a trainer that dies in step 7 is replaced by one that trains 5, 6 and 7.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        store: WeightStore,
        launcher: Launcher,
        *,
        model: nn.Module,
        num_ranks: int,
        time_limit_s: float,
        account: Account,
    ) -> None:
        """Starts the trainer.

        Args:
            settings: with the initial version and state.
            store: the weights.
            launcher: starts it.
            model: the caller's; at every call it has the weights of the latest finished step.
            num_ranks: processes that train together.
            time_limit_s: for one step.
            account: counts deaths.
        """
        self._settings = settings
        self._store = store
        self._model = model
        self._account = account
        self._jobs: list[_Job] = []
        self._expected: list[int] = []
        self._pending: int | None = None
        self._saved: list[bytes] = []
        self._is_fetching = False
        self._incoming = IncomingWeights()
        self._ranks = TrainerRanks(num_ranks, launcher, time_limit_s=time_limit_s)
        self._start()

    @property
    def children(self) -> list[ChildProcess]:
        """The processes of its ranks."""
        return self._ranks.children

    def connections(self) -> list[Transport]:
        """Connections to wait for."""
        return self._ranks.connections()

    def train(self, step: int, groups: Sequence[Group]) -> None:
        """Sends the next step."""
        tokens = sum(group.prompt.tokens.size + r.num_tokens for group in groups for r in group.rollouts)
        job = _Job(message=TrainStep(step=step, groups=groups, is_new=True), num_bytes=_TOKEN_BYTES * tokens)
        self._jobs.append(job)
        self._pending = step
        self._send(job.message)

    def receive(self) -> TrainedStep | None:
        """The sent step, once it is trained. Replaces a dead trainer.

        Raises:
            StateError: trainers die repeatedly.
            Exception: the error that the trainer raised.
        """
        messages, has_died = self._ranks.receive()
        done = None
        for message in messages:
            self._ranks.note_progress()
            if isinstance(message, PublishedWeights):
                weights = self._incoming.take(message)
                if weights is not None:
                    self._store.put_bytes(message.version, weights)
                continue
            if isinstance(message, TrainerState):
                self._saved.append(message.state)
                continue
            assert message.step == self._expected.pop(0), "steps are trained in order"
            if message.step == self._pending:
                done, self._pending = message, None
        self._ranks.end_if_silent(is_busy=bool(self._expected) or self._is_fetching)
        if has_died:
            self._account.trainer_deaths += 1
            self._ranks.reap()
            self._start()
        return done

    def fetch(self) -> bytes:
        """Fetches the trainer's state after the last step and makes it the base. Only between steps.

        Raises:
            StateError, Exception: see `receive`.
        """
        assert self._pending is None, "a state is fetched between steps"
        version = self._jobs[-1].message.step if self._jobs else self._settings.version
        state = self._fetch_state()
        self._store.write(version, self._model, BASE)
        self._settings = replace(self._settings, version=version, state=state)
        self._jobs.clear()
        return state

    def compact(self) -> None:
        """Makes a new base if the kept rollouts are larger than the current one."""
        kept = sum(job.num_bytes for job in self._jobs)
        if kept > max(_LEAST_BYTES, self._store.num_bytes + len(self._settings.state)):
            self.fetch()

    def close(self) -> None:
        """Stops the trainer."""
        self._ranks.stop()

    def _fetch_state(self) -> bytes:
        """The trainer's state; the request is sent again if the trainer is replaced."""
        asked: int | None = None
        self._is_fetching = True
        self._saved.clear()
        while not self._saved:
            if asked != self._ranks.num_starts:
                self._ranks.send(FetchState())
                asked = self._ranks.num_starts
            wait_for_any(self.connections(), timeout_s=1.0)
            self.receive()
        self._is_fetching = False
        return self._saved.pop()

    def _start(self) -> None:
        self._expected.clear()
        self._ranks.start(self._settings)
        for job in self._jobs:
            is_new = job.message.step == self._pending
            self._account.steps_trained_again += not is_new
            self._send(replace(job.message, is_new=is_new))

    def _send(self, message: TrainStep) -> None:
        self._expected.append(message.step)
        self._ranks.send(message)


class TrainerRanks:
    """The ranks of one trainer. All get every message, and rank 0 alone answers.

    A rank that dies takes the others with it, because what they have begun together is never finished.

    Example: of two ranks, after the death of the second `receive` tells it, and `reap` ends the first.
    """

    def __init__(self, num_ranks: int, launcher: Launcher, *, time_limit_s: float) -> None:
        """Starts nothing yet; see `ChildProcess` for the time limit."""
        names = ["trainer", *(f"trainer rank {rank}" for rank in range(1, num_ranks))]
        self.children = [
            ChildProcess(name, "trainer", run_trainer, launcher, time_limit_s=time_limit_s) for name in names
        ]
        self._dead: list[ChildProcess] = []
        self._rendezvous: Rendezvous | None = None
        self._held: list[TrainStep | FetchState] = []

    @property
    def num_starts(self) -> int:
        """Times that they were started, which tells them from their replacements."""
        return self.children[0].num_starts

    def connections(self) -> list[Transport]:
        """Connections to wait for."""
        return [child.connection for child in self.children]

    def start(self, settings: TrainerSettings) -> None:
        """Starts all ranks from the base of the weight store.

        Raises:
            StateError: one cannot be started.
        """
        self._rendezvous = None
        self._held.clear()
        for rank, child in enumerate(self.children):
            child.start(replace(settings, rank=rank, num_ranks=len(self.children)))
            child.offer(settings.version, BASE)

    def send(self, message: TrainStep | FetchState) -> None:
        """Sends a message to all ranks."""
        first, *others = self.children
        first.send(message)
        if others and self._rendezvous is None:
            # The others first wait to hear where to connect.
            self._held.append(message)
            return
        for child in others:
            child.send(message)

    def receive(self) -> tuple[list[Any], bool]:
        """The messages of rank 0, and whether a rank has died; see `ChildProcess.receive`.

        Raises:
            Exception: the error that a rank raised.
        """
        answers = []
        self._dead.clear()
        for child in self.children:
            messages, has_died = child.receive()
            for message in messages:
                if isinstance(message, Rendezvous):
                    self._introduce(message)
                else:
                    answers.append(message)
            if has_died:
                self._dead.append(child)
        return answers, bool(self._dead)

    def end_if_silent(self, *, is_busy: bool) -> None:
        """See `ChildProcess.end_if_silent`. Where any rank hangs in a step, rank 0 is silent; at the start, each is."""
        first, *others = self.children
        first.end_if_silent(is_busy=is_busy)
        for child in others:
            child.end_if_silent(is_busy=False)

    def reap(self) -> None:
        """Ends all ranks after the death of one.

        Raises:
            StateError: see `ChildProcess.reap`; it names a rank that had died.
        """
        living = [child for child in self.children if child not in self._dead]
        for child in [*self._dead, *living]:
            child.reap()

    def note_progress(self) -> None:
        """Resets the count of deaths."""
        for child in self.children:
            child.note_progress()

    def stop(self) -> None:
        """Kills all ranks."""
        for child in self.children:
            child.stop()

    def _introduce(self, rendezvous: Rendezvous) -> None:
        """Tells the other ranks where rank 0 listens, and what has come for them since."""
        self._rendezvous = rendezvous
        for child in self.children[1:]:
            for message in (rendezvous, *self._held):
                child.send(message)
        self._held.clear()
