"""Find out whether machines have room for a run, and which smaller run they have room for.

The arithmetic uses the total resources of each machine. Ranks that exchange heads must share a
machine, and so must the devices of an engine, so the run may not fit even if the total suffices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from homeostat.config.loading.edits import edited
from homeostat.config.parts import PlacementSettings
from homeostat.config.ray_cluster import RayCluster
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError
from homeostat.run.ray.placement import Need, Node, Resource, describe_sum, find_shortages, needs_of

RESOURCES: tuple[Resource, ...] = ("GPU", "CPU")


def has_room(config: PlacementSettings, nodes: Sequence[Node], *, device: str) -> bool:
    """Return whether the machines hold all ranks and engines at the same time."""
    needs = needs_of(config, device=device)
    return not find_shortages(config, needs, nodes) and _packs(_bundles(config, needs), nodes)


def describe_missing(config: PlacementSettings, nodes: Sequence[Node], *, device: str) -> str:
    """Return what the machines lack for the run, with the sum."""
    needs = needs_of(config, device=device)
    for resource in RESOURCES:
        has = sum(node.resources.get(resource, 0.0) for node in nodes)
        short = sum(need.count * need.of(resource) for need in needs) - has
        if short > 0:
            told = describe_sum(needs, resource, has=has)
            return f"{short:g} {resource} missing: {told}"
    return "the total is large enough, but no machine has room for a part that must stay together"


def shrunk(config: RunConfig, nodes: Sequence[Node], *, device: str) -> RunConfig | None:
    """Return the largest run of the same recipe that the machines hold; None if there is none.

    Replicas, context, sequence and expert parallelism keep their sizes, so that the number of ranks
    stays a multiple of theirs. Trainer and engines shrink alike: of all pairs that fit, the one is
    taken in which the side that loses most keeps most.
    """
    assert isinstance(config.cluster, RayCluster)
    for ranks, engines in _pairs(config.cluster.processes, config.num_engines):
        try:
            smaller = _resized(config, ranks=ranks, engines=engines, num_nodes=len(nodes))
        except ConfigError:
            # The mesh cannot be spread over so many ranks.
            continue
        if has_room(smaller.for_placement, nodes, device=device):
            return smaller
    return None


def _pairs(ranks: int, engines: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of ranks and engines, those first that keep most of both."""
    counts = range(1, engines + 1) if engines else (0,)
    pairs = itertools.product(range(1, ranks + 1), counts)

    def kept(pair: tuple[int, int]) -> tuple[float, int, int]:
        shares = [pair[0] / ranks, *([pair[1] / engines] if engines else [])]
        return min(shares), sum(pair), pair[0]

    yield from sorted(pairs, key=kept, reverse=True)


def _resized(config: RunConfig, *, ranks: int, engines: int, num_nodes: int) -> RunConfig:
    """Return the recipe with so many ranks and engines. Raises ConfigError if they cannot be."""
    assert isinstance(config.cluster, RayCluster)
    found = config
    # Fewer machines first: the ranks of each are part of what the next line checks.
    if num_nodes < config.cluster.nodes:
        found = edited(found, "cluster.nodes", max(1, num_nodes))
    found = edited(found, "cluster.processes", ranks)
    if engines not in (0, config.num_engines):
        found = edited(found, "engine.data_parallel_size", engines)
    return found


def _bundles(config: PlacementSettings, needs: Sequence[Need]) -> list[dict[Resource, float]]:
    """Return the resources that each part takes of one machine; no part spans two machines."""
    found = []
    for need in needs:
        together = config.mesh.sp if need.who == "trainer" else 1
        bundle = {resource: together * need.of(resource) for resource in RESOURCES}
        found += [bundle] * (need.count // together)
    return found


def _packs(bundles: Sequence[dict[Resource, float]], nodes: Sequence[Node]) -> bool:
    """Return whether first fit finds a machine for each, the largest first."""
    free = [{one: node.resources.get(one, 0.0) for one in RESOURCES} for node in nodes]
    for bundle in sorted(bundles, key=lambda one: (one["GPU"], one["CPU"]), reverse=True):
        room = next((left for left in free if all(left[r] >= bundle[r] for r in RESOURCES)), None)
        if room is None:
            return False
        for resource in RESOURCES:
            room[resource] -= bundle[resource]
    return True
