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
    """RMS normalisation, optionally fused with a residual sum.

    If it is `centred`, it multiplies by 1 + weight, so that a weight of 0 changes nothing.
    """

    def __init__(self, size: int, eps: float, *, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps = eps
        self.centred = centred

    def forward(self, x: Tensor, update: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x. With an update to x, return (their sum, its norm) in one pass."""
        if self.centred:
            return self._centred(x, update)
        if update is None:
            return rms_norm(x, self.weight, eps=self.eps)
        return add_rms_norm(x, update, self.weight, eps=self.eps)

    def _centred(self, x: Tensor, update: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        # 1 + weight in fp32: bf16 would round small weights away.
        scale_D = self.weight.float() + 1.0
        total = x if update is None else x + update
        wide = total.to(torch.promote_types(x.dtype, torch.float32))
        normed = rms_norm(wide, scale_D.to(wide.dtype), eps=self.eps).to(x.dtype)
        return normed if update is None else (total, normed)
