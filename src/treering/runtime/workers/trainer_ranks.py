"""Connects the ranks of a trainer: torch.distributed between processes that no torchrun has started.

Rank 0 listens on the address at which its launcher's processes reach one another, and tells it through the controller.
"""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from treering.runtime.ipc.address import is_loopback, listener_at
from treering.runtime.ipc.child import Port
from treering.runtime.ipc.messages import Rendezvous, TrainerSettings

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of torch's backends."""


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
