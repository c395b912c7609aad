"""The environment variables that SGLang reads, set before it is imported.

They switch the hub and telemetry off, use the loopback interface for collectives, and allow a
context that is a few tokens longer than the model's (core.py says why).
"""

from __future__ import annotations

import os

from homeostat.config.ranks import LOOPBACK
from homeostat.config.sglang import SglangEngineConfig

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # NaN must be seen, and not made into numbers.
    "SGLANG_SANITIZE_NAN_LOGITS": "0",
    # Log-probs at the sampling temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}
# The interface of that address, by its name: collectives do not ask for an address.
LOOPBACK_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def prepare_environment(config: SglangEngineConfig, *, device: str, host: str = LOOPBACK) -> None:
    """Set the environment of a process that hosts the engine. SGLang's processes inherit it."""
    os.environ.update(SETTINGS)
    if host == LOOPBACK:
        os.environ.update(LOOPBACK_INTERFACE)
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if config.enforce_eager:
        # SGLang compiles its sampler all the same, which takes as long as loading does.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
