"""Find out how an engine's weights are quantised, by whatever a framework calls it."""

from __future__ import annotations

from homeostat.health.rules.readings import is_true, raw
from homeostat.health.view import RunView

_KINDS = ("fp8", "int4", "int8", "awq", "gptq", "nf4", "mxfp4", "nvfp4")


def quantisation(view: RunView) -> str:
    """fp8, int4 ...; "" where the engine is not quantised, or nothing says so."""
    said = str(
        raw(view, "rollout.quantization", "quantization", "sglang_quantization") or ""
    ).lower()
    if is_true(raw(view, "fp8", "rollout_fp8", "fp8_rollout")):
        return "fp8"
    return next((kind for kind in _KINDS if kind in said), "")
