"""Several Ray nodes on loopback addresses of this machine, which stand for several machines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import ranks

STORE_BYTES = 80 * 2**20
# A raylet that does not answer for some seconds is dead: Ray's own limit is half a minute.
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
SOON |= {"health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}


def one_node(*, cpus: int, **system: int) -> Any:
    """Start a raylet at 127.0.0.2, without a driver. Returns Ray's own object, to shut it down."""
    from ray.cluster_utils import Cluster

    # What `ray start` would have to be given on a machine that does other work, too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    settings = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    settings |= {"_system_config": system} if system else {}
    return Cluster(
        initialize_head=True, head_node_args={**settings, "node_ip_address": "127.0.0.2"}
    )


def add_node(cluster: Any, address: str, *, cpus: int) -> Any:
    """Start another raylet. Returns Ray's own object."""
    return cluster.add_node(node_ip_address=address, num_cpus=cpus, object_store_memory=STORE_BYTES)


@contextmanager
def two_nodes(*, cpus: int) -> Iterator[Any]:
    """Yield Ray's own cluster of two raylets, at 127.0.0.2 and 127.0.0.3, without a driver."""
    cluster = one_node(cpus=cpus)
    try:
        add_node(cluster, "127.0.0.3", cpus=cpus)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def joining(address: str, own: str, *, cpus: int) -> Iterator[None]:
    """Have a machine join a Ray by `ray start`, which ends with the block. Ray's own class cannot
    add a raylet in a process that is connected to the cluster."""
    store = ("--object-store-memory", str(STORE_BYTES), "--num-cpus", str(cpus))
    ray = str(Path(sys.executable).with_name("ray"))
    started = subprocess.Popen(
        [ray, "start", "--address", address, "--node-ip-address", own, *store, "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        below = ranks.descendants(started.pid)
        for pid in (started.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.wait()


def lose(cluster: Any, node: Any) -> None:
    """Kill a raylet and all that it started, as if its machine were cut off from power."""
    (raylet,) = [one.process.pid for one in node.all_processes["raylet"]]
    started = ranks.descendants(raylet)
    cluster.remove_node(node, allow_graceful=False)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def guardians(group_name: str) -> list[int]:
    """Processes that guard the workers of a group, by the ticket that they began with.

    Only those that this process started: others may run an engine on the same machine.
    """
    found = []
    for entry in (Path(f"/proc/{pid}") for pid in sorted(ranks.descendants(os.getpid()))):
        with contextlib.suppress(OSError, ValueError, KeyError):
            variables = dict(
                one.split(b"=", 1) for one in (entry / "environ").read_bytes().split(b"\0") if one
            )
            ticket = json.loads(variables[b"HOMEOSTAT_WORKER"])
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            is_worker = b"HOMEOSTAT_WORKER" in Path(f"/proc/{parent}/environ").read_bytes()
            if ticket["group_name"] == group_name and not is_worker:
                found.append(int(entry.name))
    return found


class ListedNodes:
    """Stands for Ray where only its list of nodes is read: address -> CPUs of those alive."""

    def __init__(self, **cpus: float) -> None:
        self.cpus = cpus

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeManagerAddress": one, "NodeID": one, "Resources": {"CPU": has}, "Alive": True}
            for one, has in self.cpus.items()
        ]
