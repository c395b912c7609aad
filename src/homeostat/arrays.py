"""Names for the types of NumPy arrays.

They are not in types.py, because the doctor needs these names alone and starts faster without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
FloatArray64 = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
