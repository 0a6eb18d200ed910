"""What only a CUDA device does: capturing a pass, and copies that the host does not wait for. On CPU, the same plainly.

Everything else of this package runs on either, so that it can be tested where there is no device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WARM_UPS = 2
"""Runs before a capture: kernels compile and libraries make their workspaces, which a capture does not allow."""


class Mailbox:
    """Room for arrays on their way to the device; its memory there stays where it is.

    Example: `send([a, b])` gives tensors of the same shapes and dtypes on the device. They last until the next `send`.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Room for that many bytes; every array takes a multiple of 16."""
        is_cuda = device.type == "cuda"
        with plain_mode():
            self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copies arrays in one go; on CUDA, the host goes on at once and the stream's later work sees them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        host, tensors, at = self._host.numpy(), [], 0
        for array in arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[at : at + flat.size] = flat
            dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
            tensors.append(self._device[at : at + flat.size].view(dtype).view(array.shape))
            at += padded_bytes(flat.size)
        self._device[:at].copy_(self._host[:at], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return tensors


@contextmanager
def plain_mode() -> Iterator[None]:
    """Neither gradients nor inference mode, whatever the caller is in.

    A tensor made in inference mode can be written nowhere else, and a capture makes some that belong to the whole
    process: the seed of torch's random numbers, which the next capture writes.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def padded_bytes(num_bytes: int) -> int:
    """What an array of that many bytes takes in a `Mailbox`.

    Example: 1 byte takes 16, and 17 take 32.
    """
    return -(-num_bytes // 16) * 16


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one, to which kernels go; nothing for CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for CPU, where programs run one after another."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def fetch(tensor: Tensor) -> NDArray[Any]:
    """A tensor's values on the host; the one place where the host waits for the device."""
    values: NDArray[Any] = tensor.cpu().numpy()
    return values


def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What runs `work` from now on: on CUDA a graph of it, for which it runs a few times now; on CPU itself.

    The work reads and writes memory that stays where it is, allocates none and never waits.
    """
    if device.type != "cuda":
        return work
    stream, current = _capture_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            work()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # What other threads do on the device meanwhile is no part of the graph and no error.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device for warm-ups and captures: a library's workspaces belong to the stream it ran on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
