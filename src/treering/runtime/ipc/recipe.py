"""The protocol with which every child process builds its own model, task and engine. Recipes must be picklable."""

from typing import Protocol

from torch import nn

from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.rl.tasks.task import Task


class Recipe(Protocol):
    """Builds a model, a task and engines, the same in every process.

    The weights of the model do not matter: each process loads those of the run first.
    """

    @property
    def max_batch(self) -> int:
        """Rollouts that an engine of `make_engine` runs at a time; of an environment, episodes in flight."""

    def make_model(self) -> nn.Module:
        """The model, with any weights."""

    def make_task(self) -> Task:
        """Prompts and rewards."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        """An engine with the model's current weights, which have this policy version."""
