"""Arrays for tests of SIMD loops, which may read and write up to one vector past the end."""

import numpy as np
from numpy.typing import NDArray

from treering.engine.decoder.cpu.simd import lanes_of

Floats = NDArray[np.floating]
DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]


def pad_to_vector(array: Floats) -> Floats:
    """Copy the array into memory that continues with a vector of NaN."""
    spare = np.full(array.size + lanes_of(array.dtype), np.nan, array.dtype)
    spare[: array.size] = array.reshape(-1)
    return spare[: array.size].reshape(array.shape)
