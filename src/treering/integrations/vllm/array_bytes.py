"""Arrays as bytes: vLLM's processes pass no arrays by `collective_rpc`."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as an .npz file."""
    file, named = io.BytesIO(), dict[str, Any](arrays)
    np.savez(file, **named)
    return file.getvalue()


def unpacked(content: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of `packed`.

    Raises:
        ValueError: other bytes.

    Example: `unpacked(packed({"x": np.arange(3)}))["x"]` is [0, 1, 2].
    """
    return dict(np.load(io.BytesIO(content), allow_pickle=False))
