"""The machines of a Ray cluster, waited for until there are as many as the recipe asks for."""

from __future__ import annotations

import time
from typing import Any

from homeostat.config.ray_cluster import RayCluster
from homeostat.errors import ConfigError, Problem
from homeostat.run.ray.placement import Node

LOOK_SECONDS = 0.5


def require_nodes(ray: Any, cluster: RayCluster) -> list[Node]:
    """Return the nodes that are alive. Raises ConfigError if too few came in time."""
    end = time.monotonic() + cluster.start_timeout_s
    while len(nodes := alive_nodes(ray)) < cluster.nodes and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    if len(nodes) < cluster.nodes:
        there = ", ".join(node.address for node in nodes)
        why = (
            f"{cluster.nodes} machines are configured (cluster.nodes), but after "
            f"{cluster.start_timeout_s:.4g} s (cluster.start_timeout_s) the Ray cluster had only "
            f"{len(nodes)}: {there}."
        )
        hint = "Run `ray start --address=...` on the other machines, or lower cluster.nodes."
        raise ConfigError([Problem("cluster.nodes", why, hint)])
    return nodes


def own_node(ray: Any) -> Node:
    """Return the node that this process is on."""
    own = str(ray.get_runtime_context().get_node_id())
    return next(node for node in alive_nodes(ray) if node.node_id == own)


def alive_nodes(ray: Any) -> list[Node]:
    """Return the nodes of the cluster, in the order of their addresses."""
    found = [
        Node(one["NodeManagerAddress"], one["Resources"], one["NodeID"])
        for one in ray.nodes()
        if one["Alive"]
    ]
    return sorted(found, key=lambda node: (node.address, node.node_id))
