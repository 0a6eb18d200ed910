"""The protocol of engines: what the loop, the scheduler and the runtime may ask of any of them.

Knows requests, rollouts and counts. Knows nothing of models, of devices or of how tokens are drawn.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from treering.engine.request import Request, as_requests
from treering.engine.rollout import Rollout, RolloutKey

WhenRunning = Literal["finish", "abort", "reprefill"]
"""What a weight update does with running rollouts. finish: the old weights finish them first; they come out of the next
step. abort: they come out of the next step as they are. reprefill: they go on under the new weights, their keys and
values computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since an engine was made; differences of two of them describe what happened in between.

    Example: 10 forwards with 8 rows each that gave 240 tokens have `num_rows` 80 and 3.0 tokens per forward.
    """

    num_forwards: int = 0
    """Forward passes of the model."""
    num_rows: int = 0
    """Rollouts that a forward pass sampled for, summed over forwards."""
    num_sampled: int = 0
    """Tokens that rollouts gained by sampling."""
    num_prefilled: int = 0
    """Prompt and observed tokens whose keys and values were computed."""
    num_drafted: int = 0
    """Drafted tokens that were verified, once for each rollout that they were verified for."""
    num_accepted: int = 0
    """Drafted tokens that agreed with the sampled ones."""
    num_led: int = 0
    """Of `num_rows`, those that were sampled from what was computed for another rollout with the same tokens."""

    @property
    def tokens_per_forward(self) -> float:
        """Sampled tokens per rollout and forward pass: 1.0 without drafts; 0.0 before the first."""
        return self.num_sampled / self.num_rows if self.num_rows else 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0.0 where none was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """What happened after `earlier`."""
        return EngineStats(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__slots__})


class Engine(ABC):
    """Samples rollouts; a request's result depends on weights, prompt, sampling, seed and key alone (law 5)."""

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
        """Requests that were submitted and have not come out of a step."""

    @abstractmethod
    def progress(self) -> dict[RolloutKey, int]:
        """Tokens that each running rollout has, those of `so_far` included; requests that wait are left out.

        Example: {("q", 0, 3): 17} after 17 tokens of the only one that runs.
        """

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests, in order.

        Raises:
            InputError: no requests, a key that is already there, or a request that can never fit; none of them is
                queued then.
        """

    @abstractmethod
    def step(self) -> list[Rollout]:
        """Advances running rollouts and returns those that finished, tokens of `so_far` included; [] when idle."""

    @abstractmethod
    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Takes requests out, running or waiting, with what they have; unknown keys are ignored."""

    @abstractmethod
    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        """Takes the trainer's present weights as `version` and drops all keys and values.

        Raises:
            InputError: a version that is not above the present one.
        """

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submits requests and yields every finished rollout, in the order in which they finish.

        A caller that stops listening takes its requests out of the engine.

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
