"""Peak bytes that autograd keeps for the backward: the memory that a training step needs in addition to the weights.

It counts storages, so a figure is the same on every run and machine, unlike an allocator's. Not counted, because
autograd does not save them: temporaries inside an operation, gradients, tensors that a custom function keeps without
`save_for_backward`, and the inputs of checkpointed blocks.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["SavedBytes", "peak_saved_bytes", "watch_saved_bytes"]


class SavedBytes:
    """A running count of the distinct storages that saved tensors keep alive; `watch_saved_bytes` makes one.

    A storage counts whole and once, however many saved tensors view it.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        """`without`: tensors whose storages are never counted, such as a model's parameters."""
        self._left_out = {_storage_id(tensor): tensor for tensor in without}
        self._num_handles: dict[int, int] = {}
        self._alive = self._peak = 0

    @property
    def alive(self) -> int:
        """Bytes that are kept now."""
        return self._alive

    @property
    def peak(self) -> int:
        """Most bytes that were kept at one time so far."""
        return self._peak

    def pack(self, tensor: Tensor) -> "_Handle":
        """Counts a tensor from now until the handle that is returned dies."""
        # Detached: an output that an operation saves would otherwise keep the operation alive, and that the output.
        handle = _Handle(tensor.detach())
        storage = _storage_id(tensor)
        if storage in self._left_out:
            return handle
        num_bytes = tensor.untyped_storage().nbytes()
        self._num_handles[storage] = self._num_handles.get(storage, 0) + 1
        if self._num_handles[storage] == 1:
            self._alive += num_bytes
            self._peak = max(self._peak, self._alive)
        # The handle keeps the storage alive until then, so its id cannot pass to another one too early.
        weakref.finalize(handle, self._release, storage, num_bytes).atexit = False
        return handle

    def _release(self, storage: int, num_bytes: int) -> None:
        self._num_handles[storage] -= 1
        if self._num_handles[storage] == 0:
            del self._num_handles[storage]
            self._alive -= num_bytes


class _Handle:
    """Stands in for a saved tensor in autograd's graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def watch_saved_bytes(without: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Counts what is saved for backward by everything that runs in the block.

    Args:
        without: tensors that are left out; pass `model.parameters()`, which are there with or without a backward.

    Graphs made in the block are still counted after it, until they are freed. Example: `x.exp().sum()` for float32 x
    [1000] saves the result of exp, so `alive` and `peak` are 4,000 then, and `alive` is 0 after the backward.
    """
    saved = SavedBytes(without)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
        yield saved


def peak_saved_bytes(step: Callable[[], object], without: Iterable[Tensor] = ()) -> int:
    """Most bytes that a step keeps for its backward at one time.

    Example: two forwards and backwards of `x.exp().sum()` for float32 x [1000], one after the other, peak at 4,000, and
    both forwards before both backwards at 8,000.
    """
    with watch_saved_bytes(without) as saved:
        step()
    return saved.peak


def _unpack(handle: _Handle) -> Tensor:
    return handle.tensor


def _storage_id(tensor: Tensor) -> int:
    """The address of the storage itself: unlike that of its data it is distinct for empty ones."""
    return int(tensor.untyped_storage()._cdata)
