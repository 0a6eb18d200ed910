"""What the processes of the benchmark do: one publishes weights, another loads them."""

from dataclasses import dataclass

import torch
from torch import nn

from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.rl.tasks.task import Task
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.weight_layout import model_tensors

_TENSOR_VALUES = 2_621_440
"""Of a tensor: 10 MiB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRecipe:
    """Builds models of a given number of tensors; has neither a task nor engines."""

    num_tensors: int

    @property
    def max_batch(self) -> int:
        return 1

    def make_model(self) -> nn.Module:
        return nn.ParameterList(torch.ones(_TENSOR_VALUES) for _ in range(self.num_tensors))

    def make_task(self) -> Task:
        raise NotImplementedError

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """To the writer: publish a version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """To the reader: load a version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To the reader: send so many messages of so many bytes."""

    num_messages: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From either: it is done."""

    value: float = 0.0
    """A value of the model."""
    payload: bytes = b""


def run_writer(port: Port, access: WeightAccess, recipe: SizedRecipe) -> None:
    """Publishes a model whose values are the version."""
    model = recipe.make_model()
    weights = access.open(model, port)
    port.send(Ready())
    while True:
        message: Publish = port.take()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(message.version)
        # The time of filling is not the hand-over's.
        port.send(Done(value=float(message.version)))
        port.take()
        weights.put(message.version, model_tensors(model))
        port.send(Done(value=float(message.version)))


def run_reader(port: Port, access: WeightAccess, recipe: SizedRecipe) -> None:
    """Loads versions, and answers."""
    model = recipe.make_model()
    weights = access.open(model, port)
    port.send(Ready())
    while True:
        message: Load | Answer = port.take()
        if isinstance(message, Answer):
            for _ in range(message.num_messages):
                port.send(Done(payload=bytes(message.num_bytes)))
            continue
        weights.read(message.version, model)
        last = list(model.parameters())[-1].detach()
        port.send(Done(value=float(last[-1])))
