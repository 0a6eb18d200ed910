"""Arrays for tests of SIMD loops, which may read and write up to a vector after the end."""

import numpy as np
from numpy.typing import NDArray

from treering.engine.decoder.cpu.simd import lanes_of

Floats = NDArray[np.floating]
DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]


def pad_to_vector(array: Floats) -> Floats:
    """The same numbers, padded with a vector of NaN."""
    spare = np.full(array.size + lanes_of(array.dtype), np.nan, array.dtype)
    spare[: array.size] = array.reshape(-1)
    return spare[: array.size].reshape(array.shape)
