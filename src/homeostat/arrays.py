"""Types of NumPy arrays, apart from types.py: the doctor needs nothing else of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
FloatArray64 = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
