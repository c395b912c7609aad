"""Find settings of FP8 training that cannot work together."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.fp8 import Fp8Config
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

_KEY = "trainer.fp8"


def find_fp8_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of trainer.fp8, with its reason and remedy."""
    fp8 = config.trainer.fp8
    if fp8 is None:
        return
    yield from _scaling(fp8)
    if config.trainer.backend.type != "local":
        yield Problem(
            _KEY,
            "ranks gather a layer's weights for every micro-batch, and its FP8 copies would have "
            "to be created again each time.",
            "Remove it, or set trainer.backend.type=local.",
        )
    if config.trainer.backend.offload_experts:
        yield Problem(
            _KEY,
            "trainer.backend.offload_experts streams experts from host memory, and their FP8 "
            "copies would fill the GPU memory that this setting is meant to free.",
            "Remove one of the two.",
        )
    if config.model.numerics == "invariant":
        yield from _invariant(fp8)


def _invariant(fp8: Fp8Config) -> Iterator[Problem]:
    """A token's bits may depend on the token and its context alone."""
    if fp8.scaling == "delayed":
        yield Problem(
            f"{_KEY}.scaling",
            "delayed scales depend on earlier updates, and with model.numerics=invariant a "
            "token's log-prob may depend only on the weights and the token's context.",
            f"Set it to dynamic with {_KEY}.recipe=blockwise or rowwise, or model.numerics=fast.",
        )
    elif fp8.recipe == "tensorwise":
        yield Problem(
            f"{_KEY}.recipe",
            "a scale for the whole tensor depends on the other rows of the batch, and with "
            "model.numerics=invariant a token's log-prob may depend only on the weights and the "
            "token's context.",
            "Set it to blockwise or rowwise, or model.numerics=fast.",
        )


def find_late_fp8(config: RunConfig, *, total_steps: int) -> Iterator[Problem]:
    """Yield a problem if the run ends before its first step in FP8."""
    fp8 = config.trainer.fp8
    if fp8 is not None and fp8.start_step > total_steps:
        yield Problem(
            f"{_KEY}.start_step",
            f"step {fp8.start_step} comes after the last step of the run ({total_steps}), so no "
            "step would be in FP8.",
            f"Lower it, or remove {_KEY}.",
        )


def _scaling(fp8: Fp8Config) -> Iterator[Problem]:
    if fp8.scaling == "delayed" and fp8.recipe != "tensorwise":
        yield Problem(
            f"{_KEY}.scaling",
            f"delayed scaling keeps the history of one scale per tensor, and recipe={fp8.recipe} "
            "has many.",
            f"Set {_KEY}.recipe=tensorwise, or {_KEY}.scaling=dynamic.",
        )
    if fp8.scaling == "dynamic" and fp8.amax_history is not None:
        yield Problem(
            f"{_KEY}.amax_history",
            "dynamic scales have no history, so this key would have no effect.",
            f"Remove it, or set {_KEY}.scaling=delayed.",
        )
