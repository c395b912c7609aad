"""Several Ray nodes on loopback addresses of this machine, which stand for several machines."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20


def one_node(*, cpus: int) -> Any:
    """Start a raylet at 127.0.0.2, without a driver. Returns Ray's own object, to shut it down."""
    from ray.cluster_utils import Cluster

    # What `ray start` would have to be given on a machine that does other work, too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    settings = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    return Cluster(
        initialize_head=True, head_node_args={**settings, "node_ip_address": "127.0.0.2"}
    )


@contextmanager
def two_nodes(*, cpus: int) -> Iterator[Any]:
    """Yield Ray's own cluster of two raylets, at 127.0.0.2 and 127.0.0.3, without a driver."""
    cluster = one_node(cpus=cpus)
    try:
        cluster.add_node(
            node_ip_address="127.0.0.3", num_cpus=cpus, object_store_memory=STORE_BYTES
        )
        yield cluster
    finally:
        cluster.shutdown()


def guardians(group_name: str) -> list[int]:
    """Processes that guard the workers of a group, by the ticket that they began with."""
    found = []
    for entry in Path("/proc").iterdir():
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
