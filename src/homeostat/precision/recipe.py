"""How numbers are scaled into FP8: which of them share a scale, in which format, and from when.

                 activations, gradients        weights
    blockwise    1 x 128 of the summed axis    128 x 128
    rowwise      a row                         a row
    tensorwise   the whole tensor              the whole tensor

Every linear map has three products, forward, gradient of its inputs and gradient of its weight.
Each sums over another axis, so each quantises its two operands along its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from homeostat.config.fp8 import SCALES_VARIABLE, Fp8Config, Fp8Scaling

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

BLOCK = 128
# Rows and columns that share a scale; None: all of them.
Block = tuple[int | None, int | None]

_ROWS: dict[Fp8Scaling, Block] = {
    "blockwise": (1, BLOCK),
    "rowwise": (1, None),
    "tensorwise": (None, None),
}


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """A resolved recipe.

    `gradients` is the format of gradients; if it is None, their products stay in bf16.
    """

    scaling: Fp8Scaling = "blockwise"
    gradients: torch.dtype | None = E4M3
    power_of_two: bool = False
    # Number of updates that a delayed scale looks back; 0: scales are dynamic.
    history: int = 0

    @classmethod
    def of(cls, config: Fp8Config, environment: Mapping[str, str] = os.environ) -> Fp8Recipe:
        """Resolve the settings, and the environment where they are silent."""
        formats = {"e4m3": E4M3, "hybrid": E5M2, "bf16_gradients": None}
        return cls(
            scaling=config.recipe,
            gradients=formats[config.gradient_format],
            power_of_two=config.has_power_of_two_scales(environment),
            history=config.history_length if config.scaling == "delayed" else 0,
        )

    @property
    def rows(self) -> Block:
        """Return the block of activations and gradients, whose last axis is summed over."""
        return _ROWS[self.scaling]

    @property
    def weights(self) -> Block:
        """Return the block of weights."""
        return (BLOCK, BLOCK) if self.scaling == "blockwise" else self.rows

    @property
    def multiple(self) -> int:
        """Return what sizes are padded to, with zeros, before tensor cores multiply."""
        return BLOCK if self.scaling == "blockwise" else 16

    def describe(self, config: Fp8Config, environment: Mapping[str, str] = os.environ) -> str:
        """Return a line for the start of a run, including where the kind of scales comes from."""
        kinds = {E4M3: "e4m3", E5M2: "e4m3, gradients e5m2", None: "e4m3, gradients bf16"}
        scales = "power-of-two scales" if self.power_of_two else "fp32 scales"
        variable = environment.get(SCALES_VARIABLE)
        if variable is not None:
            word = "followed" if self.power_of_two == (variable == "0") else "overridden"
            scales += f" ({SCALES_VARIABLE}={variable} is {word})"
        when = f"delayed by up to {self.history} updates" if self.history else "dynamic"
        begin = f", from step {config.start_step}" if config.start_step > 1 else ""
        return f"{self.scaling} {kinds[self.gradients]}, {scales}, {when}{begin}"
