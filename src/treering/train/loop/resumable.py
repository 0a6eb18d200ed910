"""The interface that a run needs of a training loop: steps, their reports, and a state to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import nn

from treering import metrics
from treering.train.loop.update import Update
from treering.train.progress import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of one step.

    Attributes:
        step: its number, from 1.
        epoch: completed passes over the tasks.
        seconds: wall time of the step.
        update: the optimizer update.
    """

    step: int
    epoch: int
    seconds: float
    update: Update

    def values(self) -> dict[str, float]:
        """Values under the names of `treering.metrics`."""
        return self.update.values() | {
            metrics.EPOCH: self.epoch,
            metrics.STEP_S: self.seconds,
            metrics.TOKENS_PER_S: self.update.num_branch_tokens / self.seconds,
        }


@runtime_checkable
class Report(Protocol):
    """The report of one step: its number, from 1, and values under the names of `treering.metrics`."""

    @property
    def step(self) -> int:
        """Its number, from 1."""

    def values(self) -> dict[str, float]:
        """Values by metric name."""


ReportT = TypeVar("ReportT", bound=Report)


class Resumable(ABC, Generic[ReportT]):
    """A loop that can be stopped after any step and continued by another process.

    Weights, `state` and torch's random state determine all later steps, bitwise. Hints only affect speed: a run resumes
    without them too.
    """

    model: nn.Module
    """The trained model."""

    on_progress: OnProgress | None = None
    """Hears how far the running step is, but for what other processes train; the caller may set it at any time."""

    @property
    @abstractmethod
    def num_steps_done(self) -> int:
        """Steps since the start of the run, resumed ones included."""

    @abstractmethod
    def step(self) -> ReportT:
        """Does the next step."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a resumed run needs in addition to the weights: dicts, lists, numbers, strings and tensors."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`; the weights are already those of its step."""

    def save_hints(self, file: Path) -> None:
        """Writes the loop's hints to a new file; a loop without hints writes none."""

    def load_hints(self, file: Path) -> None:
        """Loads the hints of the step that `load_state` restored; a missing or damaged file at most warns."""
