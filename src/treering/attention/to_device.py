"""Index arrays, which are built on the host, on a model's device, without waiting for the device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on a device; on CPU it shares the memory of an array that may be written.

    On CUDA the copy goes through pinned memory, so that the host goes on at once: one from pageable memory waits until
    the device has done everything before it.

    Example: `to_device(np.array([1, 2]), torch.device("cpu"))` is an int64 tensor [2].
    """
    # Torch warns of arrays that may not be written, as it could not keep them so.
    tensor = torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
