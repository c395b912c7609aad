"""Count the GPUs and CPUs that a run needs, and compare them with those of the Ray cluster.

The message shows the arithmetic, because Ray itself waits for ever, without a message, for a
placement group that can never be placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from homeostat.config.parts import PlacementSettings
from homeostat.config.ray_cluster import RayCluster
from homeostat.errors import Problem

Resource = Literal["GPU", "CPU"]


@dataclass(frozen=True, slots=True)
class Need:
    """Workers of one kind: how many, and what Ray reserves for each."""

    who: str
    count: int
    gpus: float
    cpus: float

    def of(self, resource: Resource) -> float:
        return self.gpus if resource == "GPU" else self.cpus


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, with all that it has."""

    address: str
    resources: Mapping[str, float]
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The node of an actor, the address at which others reach it, and its GPUs."""

    node_id: str
    address: str
    gpus: tuple[str, ...]


def needs_of(config: PlacementSettings, *, device: str) -> list[Need]:
    """Return what the run asks for. `device` is cpu or cuda, as trainer.device was resolved."""
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    is_gpu = device == "cuda"
    found = [Need("trainer", cluster.processes, float(is_gpu), cluster.cpus_per_worker)]
    if config.num_engines and cluster.placement == "disaggregated":
        span = config.engine.num_devices if is_gpu else 0
        found.append(Need("engines", config.num_engines, span, cluster.cpus_per_worker))
    return found


def describe_sum(needs: Sequence[Need], resource: Resource, *, has: float) -> str:
    """Return "trainer 4 x 1 GPU + engines 2 x 2 GPU = 8, the cluster has 6"."""
    terms = [f"{one.who} {one.count} x {one.of(resource):g} {resource}" for one in needs]
    total = sum(one.count * one.of(resource) for one in needs)
    return f"{' + '.join(terms)} = {total:g}, the cluster has {has:g}"


def find_shortages(
    config: PlacementSettings, needs: Sequence[Need], nodes: Sequence[Node]
) -> list[Problem]:
    """Return the resources that the cluster can never provide, with the arithmetic."""
    problems = []
    for resource in ("GPU", "CPU"):
        has = sum(node.resources.get(resource, 0.0) for node in nodes)
        wanted = sum(one.count * one.of(resource) for one in needs)
        if wanted > has:
            problems.append(
                Problem(
                    "cluster.processes",
                    f"{describe_sum(needs, resource, has=has)}.",
                    _way_out(resource, needs),
                )
            )
            continue
        largest = max((node.resources.get(resource, 0.0) for node in nodes), default=0.0)
        wide = [one for one in needs if one.of(resource) > largest]
        problems += [_too_wide(one, resource, largest) for one in wide]
    return problems + _unshared(config, nodes)


def _way_out(resource: Resource, needs: Sequence[Need]) -> str:
    if resource == "CPU":
        return "Lower cluster.cpus_per_worker (a fraction will do), or add machines."
    if len(needs) > 1:
        return (
            "Set cluster.placement=colocated to share devices, lower the numbers, or add machines."
        )
    return "Lower it, or add machines."


def _too_wide(need: Need, resource: Resource, largest: float) -> Problem:
    place = "engine.tensor_parallel_size" if need.who == "engines" else "cluster.cpus_per_worker"
    why = (
        f"each of the {need.who} needs {need.of(resource):g} {resource} on one machine, and the "
        f"largest machine has {largest:g}."
    )
    return Problem(place, why, "Lower it.")


def _unshared(config: PlacementSettings, nodes: Sequence[Node]) -> list[Problem]:
    """Find colocated engines that have no ranks whose devices they could share."""
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    if cluster.placement != "colocated":
        return []
    count, span = config.num_engines, config.engine.num_devices
    if count * span <= cluster.processes:
        return []
    why = (
        f"engines {count} x {span} = {count * span} devices must belong to trainer ranks, and "
        f"there are only {cluster.processes} of these (cluster.processes)."
    )
    return [Problem("cluster.placement", why, "Lower engine.data_parallel_size, or raise it.")]
