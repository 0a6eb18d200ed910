"""The controller's client of the trainer: sends steps, and replays them to a new trainer after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

from torch import nn

from treering.rl.collect import Group
from treering.runtime.account import Account
from treering.runtime.ipc.messages import Save, Saved, Train, TrainedStep, TrainerSettings
from treering.runtime.ipc.process import ChildProcess, Context
from treering.runtime.ipc.weight_ring import BASE, WeightRing
from treering.runtime.workers.trainer_worker import train

_TOKEN_BYTES = 25
"""Of a rollout: its id, two log-probabilities, a mask and a version."""

_LEAST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """A step that the trainer was sent since its base, with the bytes of its rollouts."""

    message: Train
    num_bytes: int


class TrainerClient:
    """One trainer. Its base is the last state that was fetched: weights beside the ring, optimiser as bytes.

    Rollouts of steps since then are kept, so that a trainer that dies is replaced by one that trains them again, with
    the same result bit by bit. Once they take more room than the base they are dropped for a new base.

    Example: with the base at step 4, a trainer that dies in step 7 is followed by one that trains 5, 6 and 7.
    """

    def __init__(
        self, settings: TrainerSettings, ring: WeightRing, context: Context, *, model: nn.Module, account: Account
    ) -> None:
        """Starts the trainer.

        Args:
            settings: with the version and the state to begin with.
            ring: of weights.
            context: how processes are started.
            model: the caller's, with the weights of the latest finished step whenever a method is called.
            account: takes deaths.
        """
        self._settings = settings
        self._ring = ring
        self._model = model
        self._account = account
        self._jobs: list[_Job] = []
        self._expected: list[int] = []
        self._pending: int | None = None
        self._saved: list[bytes] = []
        self.seat = ChildProcess("trainer", train, ring.memory, context)
        self._fill()

    def connections(self) -> list[Connection]:
        """What to wait for."""
        return [self.seat.connection]

    def train(self, step: int, groups: Sequence[Group]) -> None:
        """Sends the next step."""
        tokens = sum(group.prompt.tokens.size + r.num_tokens for group in groups for r in group.rollouts)
        job = _Job(message=Train(step=step, groups=groups, is_new=True), num_bytes=_TOKEN_BYTES * tokens)
        self._jobs.append(job)
        self._pending = step
        self._send(job.message)

    def receive(self) -> TrainedStep | None:
        """The step that was sent, once it is trained; a trainer that has died is replaced.

        Raises:
            StateError: trainers die again and again.
            Exception: the error that ended the trainer.
        """
        messages, has_died = self.seat.receive()
        done = None
        for message in messages:
            self.seat.note_progress()
            if isinstance(message, Saved):
                self._saved.append(message.state)
                continue
            assert message.step == self._expected.pop(0), "steps are trained in their order"
            if message.step == self._pending:
                done, self._pending = message, None
        if has_died:
            self._account.trainer_deaths += 1
            self.seat.bury()
            self._fill()
        return done

    def fetch(self) -> bytes:
        """The trainer's state after the last step, which becomes its base; only while no step is being trained.

        Raises:
            StateError, Exception: as `receive`.
        """
        assert self._pending is None, "a state belongs to the end of a step"
        version = self._jobs[-1].message.step if self._jobs else self._settings.version
        state = self._asked()
        self._ring.write(version, self._model, BASE)
        self._settings = replace(self._settings, version=version, state=state)
        self._jobs.clear()
        return state

    def tidy(self) -> None:
        """Makes a new base where kept rollouts have become larger than that."""
        kept = sum(job.num_bytes for job in self._jobs)
        if kept > max(_LEAST_BYTES, self._ring.num_bytes + len(self._settings.state)):
            self.fetch()

    def close(self) -> None:
        """Ends the trainer."""
        self.seat.empty()

    def _asked(self) -> bytes:
        """What the trainer answers to `Save`; a new one is asked again."""
        asked: int | None = None
        self._saved.clear()
        while not self._saved:
            if asked != self.seat.pid:
                self.seat.send(Save())
                asked = self.seat.pid
            wait(self.connections(), timeout=1.0)
            self.receive()
        return self._saved.pop()

    def _fill(self) -> None:
        self._expected.clear()
        self.seat.fill(self._settings)
        for job in self._jobs:
            is_new = job.message.step == self._pending
            self._account.steps_trained_again += not is_new
            self._send(replace(job.message, is_new=is_new))

    def _send(self, message: Train) -> None:
        self._expected.append(message.step)
        self.seat.send(message)
