"""The engine protocol: everything that the loop, the scheduler and the runtime use of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from treering.engine.request import Request, as_requests
from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import ConfigError, InputError

WhenRunning = Literal["finish", "abort", "reprefill"]
"""What a weight update does with running rollouts. finish: the old weights finish them first; the next step returns
them. abort: the next step returns them as they are. reprefill: they continue under the new weights, with their keys and
values computed again."""

Keeps = Literal["tokens", "distribution"]
"""What of a rollout depends on nothing but (weights, prompt, sampling, seed, key). tokens: each of them, up to
near-ties of rounding, whatever drafts, batch, order or interruptions. distribution: that of each token given those
before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was created; subtract two with `since` to measure an interval.

    Example: 10 forwards with 8 rows each that gave 240 tokens have `num_rows` 80 and 3.0 tokens per forward.
    """

    num_forwards: int = 0
    """Forward passes of the model."""
    num_rows: int = 0
    """Sampled rollouts per forward pass, summed over passes."""
    num_sampled: int = 0
    """Tokens that rollouts gained by sampling."""
    num_prefilled: int = 0
    """Prompt and observed tokens whose keys and values were computed."""
    num_drafted: int = 0
    """Verified draft tokens, counted once for each rollout that verified them."""
    num_accepted: int = 0
    """Draft tokens that equalled the sampled ones."""
    num_duplicate_rows: int = 0
    """Of `num_rows`, the duplicate rows: those sampled from the logits of another rollout with the same tokens."""

    @property
    def tokens_per_forward(self) -> float:
        """Sampled tokens per rollout and forward pass: 1.0 without drafts; 0.0 before the first pass."""
        return self.num_sampled / self.num_rows if self.num_rows else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the draft tokens; 0.0 without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """The counts of the time since `earlier`."""
        return EngineStats(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__slots__})


class Engine(ABC):
    """Samples rollouts; a request's result depends on weights, prompt, sampling, seed and key alone (law 5).

    In which sense, each engine declares: see `keeps`.
    """

    @property
    @abstractmethod
    def keeps(self) -> Keeps:
        """What drafts, batch, order and interruptions leave as it is."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Policy version of the weights."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """Counts so far."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Submitted requests whose rollouts no step has returned yet."""

    @abstractmethod
    def progress(self) -> dict[RolloutKey, int]:
        """Tokens of each running rollout, `so_far` included; waiting requests are left out.

        Example: {("q", 0, 3): 17} after 17 tokens of the only running rollout.
        """

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests, in order.

        Raises:
            InputError: no requests, a key that is already in use, or a request that can never fit; then none is
                queued.
        """

    @abstractmethod
    def step(self) -> list[Rollout]:
        """Advances running rollouts and returns the finished ones, tokens of `so_far` included; [] when idle."""

    @abstractmethod
    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """What `abort` would return of running rollouts, which go on running; ignores other keys.

        Example: `engine.peek([key])[0].branch(5, sample=9)` branches a running rollout after its first 5 tokens.
        """

    @abstractmethod
    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Removes running or waiting requests and returns their partial rollouts; ignores unknown keys."""

    @abstractmethod
    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """Copies the trainer's current weights as `version` and drops all keys and values.

        The current version again does nothing: running rollouts, keys and values stay.

        Raises:
            InputError: a version below the current one, or the current one where the weights have changed.
        """

    def refresh_history(self) -> None:  # noqa: B027
        """Reads history published since; called after every publication that other processes may miss.

        Does nothing where the drafter reads the history in this process.
        """

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submits requests and yields each rollout when it finishes.

        Closing the iterator early aborts the remaining requests.

        Raises:
            InputError: as `submit` does.
        """
        requests = as_requests(requests)
        self.submit(requests)
        try:
            while self.num_unfinished:
                yield from self.step()
        finally:
            self.abort([request.key for request in requests])


def check_update(version: int, present: int, when_running: str) -> None:
    """Checks the arguments of `update_weights` for an engine at version `present`.

    Raises:
        InputError: a version below `present`.
        ConfigError: an unknown `when_running`.
    """
    if version < present:
        raise InputError(f"policy versions rise, and {version} is below {present}; count every weight update")
    if when_running not in get_args(WhenRunning):
        raise ConfigError(
            f"when_running is one of {', '.join(get_args(WhenRunning))}, got {when_running!r}; choose one"
        )
