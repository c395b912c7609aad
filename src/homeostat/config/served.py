"""Settings that engines share which serve a copy of the weights in a process of another project."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import key
from homeostat.config.engine import EngineConfig


class ServedEngineConfig(EngineConfig):
    """Keys that vLLM and SGLang share."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        resume="warn",
        help="dtype in which the engine computes. auto: that of the trainer's weights. vLLM "
        "refuses bfloat16 on an aarch64 CPU without bf16 instructions.",
    )
    enforce_eager: bool = key(
        False,
        resume="free",
        help="Do not compile and do not use CUDA graphs: the engine starts faster and samples "
        "more slowly.",
    )
    tensor_parallel_size: int = key(
        1, ge=1, le=64, resume="free", help="Number of devices over which each layer is split."
    )
    start_timeout_s: float = key(
        900.0,
        gt=0,
        resume="free",
        help="Seconds within which the engine must have loaded the model and answer.",
    )
    max_restarts: int = key(
        3,
        ge=0,
        resume="free",
        help="How many times the engine process is restarted after it dies. The new process "
        "receives the weights, and the interrupted round is sampled again from its start.",
    )

    @property
    def num_devices(self) -> int:
        """Return the number of devices over which one engine is split."""
        return self.tensor_parallel_size

    @property
    def own_dtype(self) -> str | None:
        """Return the dtype that the recipe sets for this engine alone."""
        return None if self.dtype == "auto" else self.dtype
