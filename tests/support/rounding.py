"""Tolerances that follow from the arithmetic, not from one machine."""

from __future__ import annotations

import torch
from torch import Tensor

# Two right implementations sum in other orders: their errors are of the same size, not the same.
_FACTOR = 8


def assert_right_to_rounding(ours: Tensor, theirs: Tensor, *, exact: Tensor) -> None:
    """Ours is as near to the float64 result as another right implementation of the same dtype is.

    The bound is a multiple of the largest error that theirs has here, and of what rounding the
    largest entry once costs.
    """
    assert exact.dtype == torch.float64, exact.dtype
    once = torch.finfo(ours.dtype).eps * exact.abs().max()
    bound = _FACTOR * ((theirs - exact).abs().max() + once)
    error = (ours - exact).abs().max()
    assert error <= bound, f"off by {error:.3g}, where rounding explains {bound:.3g}"
