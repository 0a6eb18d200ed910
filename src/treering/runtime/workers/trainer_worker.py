"""The trainer process: model and optimiser; publishes the weights of every step."""

import io
import time
from collections.abc import Mapping
from typing import Any

import torch

from treering.rl.trainer import Trainer
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.messages import FetchState, TrainedStep, TrainerSettings, TrainerState, TrainStep
from treering.runtime.ipc.weight_store import BASE
from treering.train.loop.restore import random_state, set_random_state


def run_trainer(port: Port, access: WeightAccess, settings: TrainerSettings) -> None:
    """The role of the trainer."""
    model = settings.recipe.make_model()
    weights = access.open(model, port)
    weights.read(settings.version, model, BASE)
    trainer = Trainer(model, settings.optim, settings.options)
    state = unpacked(settings.state)
    if state["optimizer"] is not None:
        trainer.load_state(state["optimizer"])
    # Last, because building a model consumes random numbers.
    set_random_state(state["random"])
    port.send(Ready())
    while True:
        message = port.take()
        if isinstance(message, FetchState):
            port.send(TrainerState(state=packed(trainer.state())))
        elif isinstance(message, TrainStep):
            started = time.perf_counter()
            trained = trainer.train(message.step, message.groups)
            ended = time.perf_counter()
            if message.is_new:
                weights.write(message.step, model)
            update_s = time.perf_counter() - ended
            port.send(TrainedStep(step=message.step, trained=trained, train_s=ended - started, update_s=update_s))


def packed(optimizer: Mapping[str, Any] | None) -> bytes:
    """Serialises an optimiser's state (None before the first step) and this process's random state."""
    stream = io.BytesIO()
    torch.save({"optimizer": optimizer, "random": random_state()}, stream)
    return stream.getvalue()


def unpacked(state: bytes) -> dict[str, Any]:
    """The inverse of `packed`: "optimizer" and "random"."""
    found: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return found
