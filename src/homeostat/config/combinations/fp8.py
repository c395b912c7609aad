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
            "delayed scales come from earlier updates, and with model.numerics=invariant the bits "
            "of a token may depend on the weights and its context alone.",
            f"Set it to dynamic with {_KEY}.recipe=blockwise or rowwise, or model.numerics=fast.",
        )
    elif fp8.recipe == "tensorwise":
        yield Problem(
            f"{_KEY}.recipe",
            "a scale of the whole tensor depends on the other rows of a batch, and with "
            "model.numerics=invariant the bits of a token may depend on its context alone.",
            "Set it to blockwise or rowwise, or model.numerics=fast.",
        )


def find_late_fp8(config: RunConfig, *, total_steps: int) -> Iterator[Problem]:
    """Yield a problem if the run ends before its first step in FP8."""
    fp8 = config.trainer.fp8
    if fp8 is not None and fp8.start_step > total_steps:
        yield Problem(
            f"{_KEY}.start_step",
            f"step {fp8.start_step} comes after the last one ({total_steps}), so that no step is "
            "in FP8.",
            f"Lower it, or remove {_KEY}.",
        )


def _scaling(fp8: Fp8Config) -> Iterator[Problem]:
    if fp8.scaling == "delayed" and fp8.recipe != "tensorwise":
        yield Problem(
            f"{_KEY}.scaling",
            f"delayed scales come from the history of one number per tensor, and {fp8.recipe} has "
            "many.",
            f"Set {_KEY}.recipe=tensorwise, or {_KEY}.scaling=dynamic.",
        )
    if fp8.scaling == "dynamic" and fp8.amax_history is not None:
        yield Problem(
            f"{_KEY}.amax_history",
            "dynamic scales have no history, so it would have no effect.",
            f"Remove it, or set {_KEY}.scaling=delayed.",
        )
