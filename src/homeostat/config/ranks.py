"""The keys of every cluster that has trainer ranks, and the kinds of workers and launchers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from homeostat.config.base import Settings, key

# Only processes of this host reach it.
LOOPBACK = "127.0.0.1"

# Ranks of the trainer; engines, and helpers of an engine, in separate processes.
WorkerKind = Literal["trainer", "engine"]
Launcher = Literal["in_process", "spawn", "torchrun", "outside", "ray"]
CollectiveBackend = Literal["auto", "gloo", "nccl"]

# Variables by which processes find each other, which whoever launches them sets.
OWNED_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("HOMEOSTAT_WORKER", "HOMEOSTAT_HOST", "PYTHONPATH"),
)


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of an environment variable")
        if name in OWNED_VARIABLES:
            raise ValueError(f"{name} is set by the launcher, separately for each process")
    return env


class RanksCluster(Settings):
    """Keys that the clusters with trainer ranks in separate processes share."""

    processes: int = key(2, ge=1, le=1024, resume="free", help="Number of trainer ranks.")
    start_timeout_s: float = key(
        300.0,
        gt=0,
        resume="free",
        help="Seconds within which all ranks must have built their model.",
    )
    timeout_s: float = key(
        1800.0,
        gt=0,
        resume="free",
        help="Seconds that any single call to a rank, and any collective, may take.",
    )
    max_restarts: int = key(
        3,
        ge=0,
        le=1000,
        resume="free",
        help="How many times in a row the trainer's ranks are restarted from the last checkpoint "
        "after a rank died, hung or lost its connection to the others. Each new checkpoint resets "
        "the count.",
    )
    backend: CollectiveBackend = key(
        "auto",
        resume="free",
        help="Library for collective operations between ranks. auto: NCCL on GPUs, gloo on the "
        "CPU. gloo also works on GPUs and lets several ranks share one GPU, but it is slow.",
    )
    env: Annotated[dict[str, str], AfterValidator(_check_env)] = key(
        {},
        resume="free",
        help="Environment variables of every trainer rank and engine, such as NCCL_DEBUG or "
        "NCCL_SOCKET_IFNAME.",
    )
