"""e4m3 copies of weights that the engine decodes from: derived buffers at fixed addresses.

Weights that are multiplied by the same inputs are one buffer (q, k and v; gate and up). The copies
are cast by the trainer's function when the engine is made and at every commit; the weights
themselves stay as they are.

Suffixes: `_O` outputs, `_K` inputs, `_G` blocks of inputs that share a scale.
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
    """Weights in e4m3. Each output has its scales, so that maps of any size lie side by side."""

    values_OK: Tensor
    scales_GO: Tensor
    scaling: Scaling

    @property
    def num_outputs(self) -> int:
        return self.values_OK.shape[0]
