"""The trainer process, or one rank of several: model and optimiser; rank 0 publishes the weights of every step."""

import io
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from treering.ranks.group import RankGroup, is_of_another
from treering.ranks.state import whole_state, whole_state_dict
from treering.rl.trainer import Trainer
from treering.runtime.ipc.address import is_loopback, listener_at
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.messages import FetchState, Rendezvous, TrainedStep, TrainerSettings, TrainerState, TrainStep
from treering.runtime.ipc.weight_layout import model_tensors
from treering.runtime.ipc.weight_store import BASE, ProcessWeights
from treering.train.loop.adapters import has_adapter
from treering.train.loop.ranks import shard_model
from treering.train.loop.restore import random_state, set_random_state

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of torch's backends."""


def run_trainer(port: Port, access: WeightAccess, settings: TrainerSettings) -> None:
    """The role of the trainer, and of each of its ranks; they shard the model, and rank 0 alone answers."""
    try:
        _train(port, access, settings)
    except RuntimeError as error:
        if settings.num_ranks == 1 or not is_of_another(error):
            raise
        # The end of another rank is no error of the run: the controller replaces all of them.
        print(f"trainer rank {settings.rank} ends, because another has ended: {error}", file=sys.stderr)
        os._exit(1)


def _train(port: Port, access: WeightAccess, settings: TrainerSettings) -> None:
    join_ranks(port, access.host, settings)
    model = settings.recipe.make_model()
    weights = access.open(model, port)
    weights.read(settings.version, model, BASE)
    group = shard_model(model) if settings.num_ranks > 1 else RankGroup()
    trainer = Trainer(model, settings.optim, settings.options, group=group, reference=settings.reference)
    state = unpacked(settings.state)
    if state["optimizer"] is not None:
        trainer.load_state(state["optimizer"])
    # Last, because building a model consumes random numbers.
    set_random_state(state["random"])
    port.send(Ready())
    while True:
        message = port.take()
        if isinstance(message, FetchState):
            _send_state(port, trainer, group)
        elif isinstance(message, TrainStep):
            _do_step(port, trainer, group, message, model, weights)


def _do_step(
    port: Port, trainer: Trainer, group: RankGroup, message: TrainStep, model: nn.Module, weights: ProcessWeights
) -> None:
    started = time.perf_counter()
    trained = trainer.train(message.step, message.groups)
    ended = time.perf_counter()
    if message.is_new:
        _publish(weights, message.step, model, group)
    update_s = time.perf_counter() - ended
    if group.rank == 0:
        port.send(TrainedStep(step=message.step, trained=trained, train_s=ended - started, update_s=update_s))


def _publish(weights: ProcessWeights, step: int, model: nn.Module, group: RankGroup) -> None:
    whole = None if group.size == 1 else whole_state_dict(model, trained_only=has_adapter(model))
    if group.rank == 0:
        weights.put(step, model_tensors(model, whole))


def _send_state(port: Port, trainer: Trainer, group: RankGroup) -> None:
    state = trainer.state()
    if group.size > 1:
        state = whole_state(state)
    if group.rank == 0:
        port.send(TrainerState(state=packed(state)))


def packed(optimizer: Mapping[str, Any] | None) -> bytes:
    """Serialises an optimiser's state (None before the first step) and this process's random state."""
    stream = io.BytesIO()
    torch.save({"optimizer": optimizer, "random": random_state()}, stream)
    return stream.getvalue()


def unpacked(state: bytes) -> dict[str, Any]:
    """The inverse of `packed`: "optimizer" and "random"."""
    found: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return found


def join_ranks(port: Port, host: str, settings: TrainerSettings) -> None:
    """Connects this rank with the others; a trainer of one rank needs no others, and nothing happens.

    On CUDA each rank takes a device of those that it sees, before it builds its model.

    Args:
        port: to the controller.
        host: an address of this machine, at which the other ranks reach it.
        settings: of the trainer, with the number of this rank.

    Raises:
        RuntimeError: torch's, where another rank has ended meanwhile.
    """
    if settings.num_ranks == 1:
        return
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    if is_loopback(host):
        _stay_on_loopback()
    store = _listening(port, host, settings) if settings.rank == 0 else _connected(port.take(), settings)
    backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=settings.rank, world_size=settings.num_ranks)


def _stay_on_loopback() -> None:
    """Lets torch's backends listen on loopback alone, unless the user has named an interface."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            for variable in _INTERFACES:
                os.environ.setdefault(variable, name)
            return


def _listening(port: Port, host: str, settings: TrainerSettings) -> Any:
    # Torch's store would listen on all interfaces; it takes a socket that listens on one.
    listener = listener_at(host)
    number = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, number, settings.num_ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    port.send(Rendezvous(host=host, port=number))
    return store


def _connected(rendezvous: Rendezvous, settings: TrainerSettings) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host, rendezvous.port, settings.num_ranks, False, wait_for_workers=False
    )
