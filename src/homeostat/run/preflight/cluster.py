"""Check the Ray cluster of a recipe: its resources, with the sum, and what every node has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from homeostat.config.ray_cluster import RayCluster
from homeostat.config.run import RunConfig
from homeostat.run.preflight.item import Item
from homeostat.run.ray.nodes import own_node, require_nodes
from homeostat.run.ray.placement import Node, describe_sum, find_shortages, needs_of
from homeostat.run.ray.proofs import prove
from homeostat.run.ray.room import has_room, shrunk
from homeostat.run.ray.vendor import connected, import_ray

# Time to wait for missing nodes. It is short, because a check should answer soon.
MAX_WAIT_SECONDS = 10.0


def cluster_items(config: RunConfig, *, device: str) -> Iterator[Item]:
    """Yield the resources that Ray has for the run, and the problems of each node. Starts nothing.

    A Ray that the run would start on this machine has this machine's resources.
    """
    cluster = config.cluster
    if not isinstance(cluster, RayCluster):
        return
    if cluster.address is None:
        import_ray()
        yield from _sums(config, _this_machine(), device=device)
        return
    soon = cluster.model_copy(
        update={"start_timeout_s": min(MAX_WAIT_SECONDS, cluster.start_timeout_s)}
    )
    with connected(cluster) as ray:
        nodes = require_nodes(ray, soon)
        yield from _sums(config, nodes, device=device)
        yield from _losses(config, nodes, own=own_node(ray), device=device)
        for found in prove(ray, config.for_placement, nodes):
            yield Item("cluster", "error" if found.is_error else "warning", found.problem.render())


def _this_machine() -> list[Node]:
    has = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
    return [Node("this machine", has)]


def _sums(config: RunConfig, nodes: Sequence[Node], *, device: str) -> Iterator[Item]:
    settings = config.for_placement
    needs = needs_of(settings, device=device)
    problems = find_shortages(settings, needs, nodes)
    for problem in problems:
        yield Item("cluster", "error", problem.render())
    if problems:
        return
    resource = "GPU" if device == "cuda" else "CPU"
    has = sum(node.resources.get(resource, 0.0) for node in nodes)
    names = ", ".join(node.address for node in nodes)
    text = f"Ray on {len(nodes)} node{'s' * (len(nodes) > 1)} ({names}): "
    facts = {"nodes": [node.address for node in nodes], "resource": resource, "has": has}
    yield Item("cluster", "ok", text + describe_sum(needs, resource, has=has), facts)


def _losses(config: RunConfig, nodes: Sequence[Node], *, own: Node, device: str) -> Iterator[Item]:
    """Report what the loss of a machine would do to the run. The loss of the controller's machine
    ends it.
    """
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    others = [node for node in nodes if node.node_id != own.node_id]
    if not others:
        return
    if cluster.on_lost_node == "wait":
        limit = f"{cluster.node_timeout_s:g} s (cluster.node_timeout_s)"
        text = f"if a machine is lost, the run waits up to {limit} for one (cluster.on_lost_node)"
        yield Item("cluster", "ok", text, {"on_lost_node": "wait"})
        return
    for lost in others:
        left = [node for node in nodes if node is not lost]
        if has_room(config.for_placement, left, device=device):
            continue
        smaller = shrunk(config, left, device=device)
        if smaller is None:
            text = f"if {lost.address} is lost, no smaller run fits on the others: it waits for one"
            yield Item("cluster", "warning", text)
            continue
        engines = f" and {smaller.num_engines} of {config.num_engines} engines"
        text = (
            f"if {lost.address} is lost, the run shrinks to {smaller.cluster.processes} of "
            f"{cluster.processes} ranks{engines * bool(config.num_engines)}"
        )
        yield Item("cluster", "ok", text, {"ranks": smaller.cluster.processes})
