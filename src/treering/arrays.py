"""Names for the numpy arrays in signatures, one per element type.

Shapes are written in docstrings: `Int32Array` says int32, not how many axes.
"""

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Int8Array = NDArray[np.int8]
Int16Array = NDArray[np.int16]
UInt8Array = NDArray[np.uint8]
UInt16Array = NDArray[np.uint16]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
