"""Settings of training in FP8."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from homeostat.config.base import Settings, key

Fp8Scaling = Literal["blockwise", "rowwise", "tensorwise"]
Fp8Format = Literal["e4m3", "hybrid", "bf16_gradients"]

# Transformer Engine's variable: 1 asks for fp32 scales of blocks, 0 for powers of two.
SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"


class Fp8Config(Settings):
    """Linear layers computed in FP8: which numbers share a scale, and which layers are included."""

    recipe: Fp8Scaling = key(
        "blockwise",
        help="Which numbers share a scale. blockwise: 128 neighbours of a row of activations or "
        "gradients, and 128 x 128 weights. rowwise: a row. tensorwise: the whole tensor.",
        resume="warn",
    )
    format: Fp8Format | None = key(
        None,
        help="e4m3: weights, activations and gradients are e4m3. hybrid: weights and activations "
        "are e4m3; gradients are e5m2, which has a wider range and a lower precision. "
        "bf16_gradients: matrix products with gradients stay in bf16. Default: e4m3; hybrid with "
        "recipe=tensorwise.",
        resume="warn",
    )
    scaling: Literal["dynamic", "delayed"] = key(
        "dynamic",
        help="dynamic: compute a scale from the numbers that it scales. delayed: compute it from "
        "the largest numbers of earlier updates, which saves a pass over memory (only with "
        "recipe=tensorwise).",
        resume="warn",
    )
    amax_history: int | None = key(
        None,
        ge=1,
        le=1024,
        resume="warn",
        help="Number of earlier updates from whose largest numbers a delayed scale is computed. "
        "Default: 16.",
    )
    power_of_two_scales: bool | None = key(
        None,
        help="Round scales up to powers of two. Default: false, unless the environment variable "
        f"{SCALES_VARIABLE} is 0; 1 means false.",
        resume="warn",
    )
    skip_layers: tuple[str, ...] = key(
        ("lm_head", "embed"),
        share=True,
        resume="warn",
        help="Layers that stay in bf16: words of their names, globs over whole names, or regular "
        "expressions after `re:`.",
    )
    skip_first: int = key(
        0, ge=0, resume="warn", help="Number of first decoder layers that stay in bf16."
    )
    skip_last: int = key(
        0, ge=0, resume="warn", help="Number of last decoder layers that stay in bf16."
    )
    start_step: int = key(
        1,
        ge=1,
        resume="warn",
        help="First step in FP8, counted from 1. Earlier steps are in bf16.",
    )

    @property
    def gradient_format(self) -> Fp8Format:
        """Return the format, or its default for the recipe."""
        return self.format or ("hybrid" if self.recipe == "tensorwise" else "e4m3")

    @property
    def history_length(self) -> int:
        """Return the number of updates that a delayed scale looks back."""
        return self.amax_history or 16

    def has_power_of_two_scales(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether scales are powers of two: the recipe's word, or else the environment's."""
        if self.power_of_two_scales is not None:
            return self.power_of_two_scales
        return scales_of_environment(environment) or False


def scales_of_environment(environment: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether the environment asks for powers of two; None if it says nothing."""
    return {"0": True, "1": False}.get(environment.get(SCALES_VARIABLE, ""))
