"""The processes of a trainer: one, or several ranks that live and die together."""

from dataclasses import replace
from typing import Any

from treering.runtime.ipc.launcher import Launcher, Transport
from treering.runtime.ipc.messages import FetchState, Rendezvous, TrainerSettings, TrainStep
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.ipc.weight_store import BASE
from treering.runtime.workers.trainer_worker import run_trainer


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
