"""What a forward saves for its backward: how much that is, and keeping it in host memory until it is read.

Knows torch's saved tensors. Knows nothing of trees.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from treering.model.families import ModelParts


class _OnHost(NamedTuple):
    tensor: Tensor
    device: torch.device


def saved_bytes(run: Callable[[], object], parts: ModelParts) -> int:
    """Bytes that a forward saves for its backward: storages that are not weights, each counted once.

    Args:
        run: the forward; its result is kept until the count is done.
        parts: of the model, whose weights are left out.
    """
    weights = _weight_storages(parts)
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in weights:
            storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(storages.values())


@contextmanager
def saved_on_host(parts: ModelParts) -> Iterator[None]:
    """Tensors that are saved inside go to the host; weights stay, since they are on the device anyway.

    Where the model is in host memory already, nothing moves.
    """
    weights = _weight_storages(parts)

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        if tensor.device.type == "cpu" or _storage(tensor) in weights:
            return tensor
        return _OnHost(_to_host(tensor), tensor.device)

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed.tensor.to(packed.device, non_blocking=True) if isinstance(packed, _OnHost) else packed

    with saved_tensors_hooks(pack, unpack):
        yield


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _weight_storages(parts: ModelParts) -> set[int]:
    return {_storage(weight) for module in (parts.decoder, parts.head) for weight in module.parameters()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
