"""The protocol with which every child process builds its own model, task and engine. Recipes must be picklable."""

from typing import Protocol

from torch import nn

from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.rl.tasks.task import Task


class Recipe(Protocol):
    """A model, a task and engines, the same in every process that asks.

    Weights that a model comes with are of no account: each process takes the run's own before it uses them.
    """

    @property
    def max_batch(self) -> int:
        """Rollouts that an engine of `make_engine` runs at one time."""

    def make_model(self) -> nn.Module:
        """The model, with whatever weights."""

    def make_task(self) -> Task:
        """Prompts and rewards."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        """An engine whose weights, the model's present ones, are of a version."""
