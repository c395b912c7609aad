"""Settings of a run whose processes are placed by Ray, on one machine or on many."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import key
from homeostat.config.ranks import LOOPBACK, Launcher, RanksCluster, WorkerKind

Placement = Literal["colocated", "disaggregated"]
OnLostNode = Literal["wait", "shrink"]


class RayCluster(RanksCluster):
    """Run trainer ranks and engines where Ray has free resources. One controller directs them."""

    type: Literal["ray"]
    address: str | None = key(
        None,
        resume="free",
        help="Address of a running Ray cluster that this machine belongs to: host:port, or auto "
        "for the one that was started on this machine. Default: start a Ray cluster on this "
        "machine only, and stop it when the run ends.",
    )
    nodes: int = key(
        1,
        ge=1,
        le=4096,
        resume="free",
        help="Number of machines that the Ray cluster must have before the run starts its "
        "processes. The run waits for them for at most start_timeout_s.",
    )
    placement: Placement = key(
        "disaggregated",
        resume="free",
        help="disaggregated: trainer ranks and engines have separate devices. colocated: an "
        "engine on N devices shares those of N trainer ranks, and each sleeps while the other "
        "works (engine.sleep).",
    )
    cpus_per_worker: float = key(
        1.0,
        gt=0,
        le=1024,
        resume="free",
        help="CPUs that Ray reserves for each trainer rank and each engine; fractions are "
        "allowed. A colocated engine shares the CPUs of its ranks.",
    )
    on_lost_node: OnLostNode = key(
        "wait",
        resume="free",
        help="Reaction to the loss of a machine whose processes do not fit on the others. wait: "
        "wait for that machine or another one. shrink: continue from the last checkpoint with as "
        "many ranks and engines as fit on the others; each update still has all of its rows.",
    )
    node_timeout_s: float = key(
        3600.0,
        gt=0,
        resume="free",
        help="Seconds that a run waits for machines after one was lost. With on_lost_node: shrink "
        "it waits only if not even the smallest mesh fits on the machines that are left.",
    )

    @property
    def ranks_per_host(self) -> int:
        """Return the number of trainer ranks on each machine."""
        return max(1, self.processes // self.nodes)

    @property
    def host(self) -> str:
        """Return the address of the controller's own helpers. Workers get their node's."""
        return LOOPBACK

    def launcher(self, kind: WorkerKind) -> Launcher:
        """Return what launches workers of any kind, which is Ray."""
        return "ray"
