"""Refuse a transport of weights that cannot reach an engine on another machine."""

from __future__ import annotations

from collections.abc import Sequence

from homeostat.config.sync import AnyTransport, CudaIpcConfig, SharedMemoryConfig
from homeostat.errors import ConfigError, Problem
from homeostat.run.ray.placement import Place


def require_reachable(chosen: AnyTransport | None, ranks: Sequence[Place], engine: Place) -> None:
    """Raise ConfigError if weights go by memory of one machine, and the engine is on another.

    The first rank sends them; without a choice, by shared memory.
    """
    transport = chosen or SharedMemoryConfig()
    if engine.node_id == ranks[0].node_id:
        return
    if isinstance(transport, SharedMemoryConfig | CudaIpcConfig):
        why = (
            f"{transport.type} is memory of one machine: the first trainer rank, which sends the "
            f"weights, is on {ranks[0].address}, and the engine on {engine.address}."
        )
        hint = "Set it to collective, or to disk with a folder that both machines have."
        raise ConfigError([Problem("sync.transport.type", why, hint)])
