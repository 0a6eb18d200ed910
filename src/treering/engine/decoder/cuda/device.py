"""Capture graphs and copy asynchronously on CUDA, with plain equivalents on CPU.

The rest of the package runs on both, so it can be tested without a GPU.
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
"""Runs before a capture, in which kernels compile and libraries allocate workspaces; a capture allows neither."""


class StagingBuffer:
    """Buffer that copies arrays to a fixed address on the device.

    Example: `send([a, b])` returns tensors of the same shapes and dtypes on the device, valid until the next `send`.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate `num_bytes`; each array takes a multiple of 16."""
        is_cuda = device.type == "cuda"
        with no_grad_mode():
            self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy arrays in one transfer; on CUDA the host does not wait, and later work on the stream sees them."""
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


class Staging:
    """Staging buffer that grows when needed, which changes its address."""

    def __init__(self, device: torch.device) -> None:
        """Allocate at first use."""
        self._device = device
        self._buffer, self._num_bytes = StagingBuffer(device, 0), 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy arrays to the device as `StagingBuffer.send` does."""
        num_bytes = sum(padded_bytes(array.nbytes) for array in arrays)
        if num_bytes > self._num_bytes:
            self._num_bytes = 2 * num_bytes
            self._buffer = StagingBuffer(self._device, self._num_bytes)
        return self._buffer.send(arrays)


@contextmanager
def no_grad_mode() -> Iterator[None]:
    """Turn off gradients and inference mode.

    Tensors created in inference mode can be written only there, and a capture creates one for the whole process: the
    seed of torch's random numbers, which the next capture writes.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def padded_bytes(num_bytes: int) -> int:
    """Return the bytes that an array of `num_bytes` takes in a `StagingBuffer`.

    Example: 1 byte takes 16, and 17 take 32.
    """
    return -(-num_bytes // 16) * 16


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a CUDA device is current for kernel launches; it does nothing for CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 for CPU, where programs run one after another."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy a tensor to the host; the only place where the host waits for the device."""
    values: NDArray[Any] = tensor.cpu().numpy()
    return values


def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture `work` in a CUDA graph after warm-up runs, and return its replay; on CPU return `work` itself.

    `work` must use memory at fixed addresses, allocate nothing and never wait for the device.
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
    # Other threads may use the device meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's one stream for warm-ups and captures, because library workspaces belong to a stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
