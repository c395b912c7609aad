"""The environment variables that vLLM reads, set before it is imported.

They switch usage statistics, telemetry and the hub off, run the engine core in this process, so
that a crash of the core ends this process, and bind sockets to the address that the cluster names,
by default the loopback interface.
"""

from __future__ import annotations

import math
import os

from homeostat.config.cluster import LOOPBACK
from homeostat.config.vllm import VllmEngineConfig

SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOOPBACK_IP": LOOPBACK,
}
# The interface of that address, by its name: collectives do not ask for an address.
LOOPBACK_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# Defaults that a user may override: set only if they are not set.
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING"}


def prepare_environment(config: VllmEngineConfig, *, host: str = LOOPBACK) -> None:
    """Set the environment of a process that hosts the engine. vLLM's workers inherit it."""
    os.environ.update(SETTINGS)
    os.environ["VLLM_HOST_IP"] = host
    # Ray's limit for one step of an engine that it runs: ours decides when an engine is stuck.
    limit = str(math.ceil(config.stall_s))
    os.environ.update({"RAY_CGRAPH_get_timeout": limit, "RAY_CGRAPH_submit_timeout": limit})
    if host == LOOPBACK:
        os.environ.update(LOOPBACK_INTERFACE)
    if config.enforce_eager:
        # vLLM compiles some of its sampler all the same, which costs as much as loading does.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
