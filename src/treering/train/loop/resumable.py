"""The interface that a run needs of a training loop: steps, their reports, and a state to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import nn


@runtime_checkable
class Report(Protocol):
    """What one step did: its number, from 1, and figures under the names of `treering.metrics`."""

    @property
    def step(self) -> int:
        """Its number, from 1."""

    def values(self) -> dict[str, float]:
        """Figures by name."""


ReportT = TypeVar("ReportT", bound=Report)


class Resumable(ABC, Generic[ReportT]):
    """A loop that can be stopped after any step and continued by another process.

    Weights, `state` and torch's random state decide what comes next, bit by bit. Hints decide how fast it comes: a run
    without them goes on all the same.
    """

    model: nn.Module
    """What is trained."""

    @property
    @abstractmethod
    def num_steps_done(self) -> int:
        """Steps since the start of the run, resumed ones included."""

    @abstractmethod
    def step(self) -> ReportT:
        """Does the next step."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights: dictionaries, lists, numbers, strings and tensors."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`; the weights are already those of its step."""

    def save_hints(self, file: Path) -> None:
        """Writes what may be lost to a new file; a loop without hints writes none."""

    def load_hints(self, file: Path) -> None:
        """Takes the hints of the step that `load_state` went to; a missing or damaged file is a warning at most."""
