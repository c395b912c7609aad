"""RMS normalisation: x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

The mean and the root are taken in fp32 whatever the input dtype; the result has the input dtype.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    return functional.rms_norm(x, weight_D.shape, weight_D, eps)
