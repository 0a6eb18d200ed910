"""Names for the numpy arrays in signatures, one per element type. Shapes are in the docstrings."""

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Int8Array = NDArray[np.int8]
UInt8Array = NDArray[np.uint8]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
