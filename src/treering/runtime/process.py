"""Define the processes of a run: their work, their starter, and the controller's handle, which replaces dead ones."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias

from treering.errors import StateError
from treering.runtime.messages import EnvironmentClosed, Ready, Recipe

Kind: TypeAlias = Literal["rollout_worker", "reward_worker", "trainer"]
"""Kind of a process."""

MAX_DEATHS = 5
"""Consecutive deaths without progress that end the run."""

_CLOSE_POLL_S = 0.1


class Role(Protocol):
    """Work of a process, which takes messages and works between them."""

    @property
    def is_busy(self) -> bool:
        """Whether `advance` has something to do."""

    def do(self, message: Any) -> None:
        """Take a message."""

    def advance(self) -> list[Any]:
        """Do a small part of the work; return the resulting messages to the controller."""


class ActorDied(Exception):  # noqa: N818
    """Raised when a process has ended in any way; the text gives the cause as far as it is known."""


class Actor(Protocol):
    """Process that was started, perhaps on another host, and may not run yet."""

    def send(self, message: object) -> None:
        """Send a message; it waits if the process does not run yet."""

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting.

        Raises:
            ActorDied: if no message is left and the process has ended.
            Exception: the error that its role raised.
        """

    def kill(self) -> None:
        """Kill the process without waiting for its end."""


class Actors(Protocol):
    """Starter of a run's processes and holder of its weights: Ray (`treering.runtime.ray_actors`), or a test.

    Example: `actors.start("trainer", TrainerWorker, settings)` starts a process that makes `TrainerWorker(settings)`.
    """

    @property
    def is_one_host(self) -> bool:
        """Whether all processes run on one host."""

    def open(self, recipe: Recipe) -> None:
        """Prepare for processes that unpickle `recipe`.

        Raises:
            ConfigError: if there is no room for the processes of the run.
        """

    def start(self, kind: Kind, role: Callable[[Any], Role], settings: Any) -> Actor:
        """Start a process, without waiting until it runs."""

    def put(self, weights: Any) -> Any:
        """Return a reference to weights, which a message may carry."""

    def get(self, ref: Any) -> Any:
        """Return the weights of a reference."""

    def wait(self, actors: Iterable[Actor], timeout_s: float) -> None:
        """Wait until one of the processes has sent something or died, or for `timeout_s` seconds."""

    def close(self) -> None:
        """Free everything that `open` took, after the end of all processes."""


class RunProcess:
    """Named process of a run from the controller's view: messages, silence, deaths.

    Example: a killed process yields its sent messages, then `has_died`; `start` starts the next one.
    """

    def __init__(
        self, name: str, kind: Kind, role: Callable[[Any], Role], actors: Actors, *, time_limit_s: float
    ) -> None:
        """Set up without starting the process.

        Args:
            name: name in errors.
            kind: decides which resources are reserved.
            role: class of its role, which is made with the settings of `start`.
            actors: starts it.
            time_limit_s: seconds that it may be silent while it has work; `end_if_silent` ends it then.
        """
        self.name = name
        self._kind, self._role, self._actors = kind, role, actors
        self._time_limit_s = time_limit_s
        self._last_message_s = time.monotonic()
        self._was_silent = False
        self.actor: Actor | None = None
        self.num_starts = 0
        self.num_deaths = 0
        """Consecutive deaths without progress in between."""
        self.is_ready = False
        self.pid: int | None = None
        """Process id on its host, once it is ready."""
        self._cause = ""

    def start(self, settings: object) -> None:
        """Start the process with the settings of its role."""
        self.actor = self._actors.start(self._kind, self._role, settings)
        self.num_starts += 1
        self.is_ready = self._was_silent = False
        self._last_message_s = time.monotonic()

    def send(self, message: object) -> None:
        """Send a message; a dead process drops it, and `receive` reports the death."""
        if self.actor is not None:
            self.actor.send(message)

    def receive(self) -> tuple[list[Any], bool]:
        """Return the messages of the process and whether it has died; messages sent before its death are valid.

        Raises:
            Exception: the error that its role raised.
        """
        messages: list[Any] = []
        has_died = self.actor is None
        try:
            if self.actor is not None:
                messages = self.actor.receive()
        except ActorDied as death:
            has_died, self._cause = True, str(death)
        if messages:
            self._last_message_s = time.monotonic()
        for message in messages:
            if isinstance(message, Ready):
                self.is_ready, self.pid = True, message.pid
        return [message for message in messages if not isinstance(message, Ready)], has_died

    def end_if_silent(self, *, is_busy: bool) -> None:
        """Kill a process that has work or is not ready, if it sent nothing within its time limit.

        `receive` reports its death. Call this after every `receive`.
        """
        now_s = time.monotonic()
        if self.is_ready and not is_busy:
            self._last_message_s = now_s
        elif self.actor is not None and now_s > self._last_message_s + self._time_limit_s:
            self._was_silent = True
            self.actor.kill()

    def reap(self) -> str:
        """Clean up a dead process; return how it ended.

        Raises:
            StateError: if it is the `MAX_DEATHS`-th death in a row.
        """
        self.stop()
        self.num_deaths += 1
        if self.num_deaths < MAX_DEATHS:
            return self._cause
        cause = f"at last with {self._cause}; free memory, or read its output"
        if self._was_silent:
            cause = f"at last after runtime.worker_time_limit_s = {self._time_limit_s:g} s of silence; raise the limit"
        raise StateError(f"the {self.name} died {self.num_deaths} times in a row without progress, {cause}")

    def note_progress(self) -> None:
        """Reset the count of consecutive deaths."""
        self.num_deaths = 0

    def wait_until_closed(self, end_s: float) -> None:
        """Wait until the process has closed its environment or ended, at most until `end_s` on the monotonic clock."""
        with suppress(Exception):
            while self.actor is not None and time.monotonic() < end_s:
                self._actors.wait([self.actor], _CLOSE_POLL_S)
                messages, has_died = self.receive()
                if has_died or any(isinstance(message, EnvironmentClosed) for message in messages):
                    return

    def stop(self) -> None:
        """Kill the process, if there is one."""
        if self.actor is not None:
            self.actor.kill()
        self.actor = self.pid = None
