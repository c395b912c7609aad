"""The e4m3 copies of weights that the engine decodes from.

They are the copies that the model's own products read (precision/fp8_linear.py), laid side by side
where maps have the same inputs (q, k and v; gate and up): one launch multiplies by all of them.
They are made anew after the weights have changed, at the same addresses.

Suffixes: `_O` outputs, `_K` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scaling:
    """Which inputs share a scale: a block of neighbours, or all of a row."""

    is_blockwise: bool
    has_power_of_two_scales: bool


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weights in e4m3 with fp32 scales: [O / 128, blocks of inputs] of squares, or [O] of rows."""

    values_OK: Tensor
    scales: Tensor
    scaling: Scaling

    @property
    def num_outputs(self) -> int:
        return self.values_OK.shape[0]

    @property
    def pitch(self) -> int:
        """Scales from one row of squares to the next."""
        return self.scales.stride(0)
