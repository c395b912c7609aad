"""The smallest modules of a decoder: its embedding, and its norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from homeostat.ops.norms import add_rms_norm, rms_norm


class Embedding(nn.Embedding):
    """nn.Embedding that does not initialise itself on the meta device.

    torch would import its compiler for that, which takes seconds.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    """RMS normalisation, optionally fused with a residual sum."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x. With an update to x, return (their sum, its norm) in one pass."""
        if update is None:
            return rms_norm(x, self.weight, eps=self.eps)
        return add_rms_norm(x, update, self.weight, eps=self.eps)
