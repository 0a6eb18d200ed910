"""Workers as objects of the test's process, in turns: the laws' `Actors`, which depend on no clock and no Ray."""

import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from treering.runtime.messages import Recipe
from treering.runtime.process import Actor, ActorDied, Kind, Role


def die() -> None:
    """End the process whose turn it is, or the real one that calls it."""
    if not _turns:
        os.kill(os.getpid(), signal.SIGKILL)
    _turns[-1].is_dead = True


def hang() -> None:
    """Stop the process whose turn it is for ever, or the real one that calls it."""
    if not _turns:
        time.sleep(3600)
    else:
        _turns[-1].is_hung = True


_turns: list["TestActor"] = []


class TestActor:
    """Role that works when the controller waits. Messages are pickled, as between processes."""

    __test__ = False

    def __init__(self, role: Callable[[Any], Role], settings: Any) -> None:
        self._make, self._settings = role, pickle.dumps(settings)
        self._role: Role | None = None
        self._inbox: deque[bytes] = deque()
        self._outbox: list[bytes] = []
        self._error: Exception | None = None
        self.is_dead = self.is_hung = False

    def send(self, message: object) -> None:
        self._inbox.append(pickle.dumps(message))

    def receive(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        if self.is_dead and not self._outbox:
            raise ActorDied("a kill of the test")
        found, self._outbox = [pickle.loads(message) for message in self._outbox], []
        return found

    def kill(self) -> None:
        self.is_dead = True

    @property
    def has_news(self) -> bool:
        return self.is_dead or self._error is not None or bool(self._outbox)

    def take_turn(self) -> None:
        """Take all messages and do a small part of the work."""
        if self.is_dead or self.is_hung or self._error is not None:
            return
        _turns.append(self)
        folder = os.getcwd()
        try:
            said = self._advance()
        except Exception as error:
            self._error = error
            return
        finally:
            os.chdir(folder)
            _turns.pop()
        # Messages that a process has not sent are lost with it.
        if not self.is_dead and not self.is_hung:
            self._outbox += [pickle.dumps(message) for message in said]

    def _advance(self) -> list[Any]:
        if self._role is None:
            self._role = self._make(pickle.loads(self._settings))
            return []
        while self._inbox:
            self._role.do(pickle.loads(self._inbox.popleft()))
        return self._role.advance() if self._role.is_busy else []


class TestActors:
    """The `Actors` of a run in this process."""

    __test__ = False
    is_one_host = True

    def __init__(self) -> None:
        self.started: list[tuple[Kind, TestActor]] = []

    def open(self, recipe: Recipe) -> None:
        pickle.dumps(recipe)

    def start(self, kind: Kind, role: Callable[[Any], Role], settings: Any) -> TestActor:
        actor = TestActor(role, settings)
        self.started.append((kind, actor))
        return actor

    def put(self, weights: Any) -> Any:
        return pickle.loads(pickle.dumps(weights))

    def get(self, ref: Any) -> Any:
        return ref

    def wait(self, actors: Iterable[Actor], timeout_s: float) -> None:
        own = [each for each in actors if isinstance(each, TestActor)]
        for each in own:
            each.take_turn()
        if not any(each.has_news for each in own):
            for each in own:
                each.take_turn()

    def close(self) -> None:
        self.started.clear()
