"""Cases of the keys of a cluster that Ray places workers on. One Ray of this machine serves all."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache

import pytest
from tests.support import ray_nodes, tiny_rl
from tests.support.every_key.cluster import of, shards, variables_reach_the_ranks
from tests.support.every_key.workshop import Case, Workshop, all_of, refuses, shows

from homeostat.errors import ConfigError, WorkerError
from homeostat.run.ray.machines import Machines
from homeostat.run.ray.nodes import alive_nodes
from homeostat.run.ray.placement import Node, find_shortages, needs_of


@cache
def address() -> str:
    """Return the address of a Ray of four CPUs, which ends with the tests."""
    pytest.importorskip("ray")
    nodes = ray_nodes.one_node(cpus=4)
    atexit.register(nodes.shutdown)
    return str(nodes.address)


def on_ray(make: Callable[[tuple[str, ...]], Case]) -> Case:
    """Return a case whose base is a run of one rank on Ray, which is started when it is needed."""

    def case(workshop: Workshop) -> None:
        base = f"cluster={{type: ray, address: '{address()}', processes: 1}}"
        make((base, "trainer.backend={type: fsdp}"))(workshop)

    return case


def refused(change: str, why: str) -> Case:
    return on_ray(lambda base: refuses(change, why, base=base))


def changed(keys: str, why: str) -> Case:
    """Several keys of the cluster are changed at once, which is refused."""

    def make(base: tuple[str, ...]) -> Case:
        return refuses(base[0].replace("}", f", {keys}}}"), why, base=base)

    return on_ray(make)


def engines_share_the_ranks_devices(workshop: Workshop) -> None:
    """Four CPUs hold a rank of four and no engine, unless they share; tests/integration/
    test_ray_run.py runs with it."""
    recipe = tiny_rl.recipe(workshop.folder / "ray_rl", engine={"own_process": True})
    recipe |= {"cluster": {"type": "ray", "processes": 1, "cpus_per_worker": 4.0}}
    recipe["trainer"]["backend"] = {"type": "fsdp"}
    found = {}
    for placement in ("disaggregated", "colocated"):
        recipe["cluster"]["placement"] = placement
        config = tiny_rl.build_config(recipe, [], file=None).for_placement
        needs = needs_of(config, device="cpu")
        found[placement] = find_shortages(config, needs, [Node("here", {"CPU": 4.0})])
    assert "trainer 1 x 4 CPU + engines 1 x 4 CPU = 8" in found["disaggregated"][0].message
    assert found["colocated"] == []
    with pytest.raises(ConfigError, match="colocated lets engines share"):
        on_ray(lambda base: lambda shop: shop.again(*base, "cluster.placement=colocated"))(workshop)


def after_a_loss(**keys: str | float) -> tuple[int, list[str]]:
    """Return the ranks of a run that loses one of two machines, and what it tells of;
    tests/integration/test_lost_nodes.py has real machines."""
    raw = {"name": "run", "model": {"path": "m"}, "trainer": {"backend": {"type": "fsdp"}}}
    raw |= {"data": {"train": [{"type": "messages", "path": "rows.jsonl"}]}}
    raw |= {"cluster": {"type": "ray", "address": "auto", "processes": 2, "nodes": 2, **keys}}
    ray = ray_nodes.ListedNodes(one=1, two=1)
    config = tiny_rl.build_config(raw, [], file=None)
    machines = Machines(ray, config, device="cpu", nodes=alive_nodes(ray))
    del ray.cpus["two"]
    told: list[str] = []
    fitting = machines.refit(lambda kind, /, **fields: told.append(kind))
    return fitting.cluster.processes, told


def a_lost_machine_is_waited_for_or_not(workshop: Workshop) -> None:
    shrunk = after_a_loss(on_lost_node="shrink", node_timeout_s=0.01)
    assert shrunk == (1, ["node_lost", "cluster_shrunk"])
    with pytest.raises(WorkerError, match=r"No machine came within 0\.01 s"):
        after_a_loss(on_lost_node="wait", node_timeout_s=0.01)


# No update is that fast; ranks that are late are not started again.
HASTY = "timeout_s: 0.005, max_restarts: 0"

CASES: dict[str, Case] = {
    "cluster.type (ray)": refuses("cluster={type: ray}", "the ranks would have nothing to do"),
    "cluster.address (ray)": refused("cluster.address='127.0.0.1:9'", "no Ray cluster answers at"),
    "cluster.processes (ray)": on_ray(
        lambda base: all_of(
            shows("cluster.processes=2", shards, was=of(1), now=of(2), base=base),
            refuses("cluster.processes=5", "trainer 5 x 1 CPU = 5, the cluster has 4", base=base),
        )
    ),
    "cluster.nodes (ray)": changed("nodes: 2, start_timeout_s: 1.0", "2 machines are configured"),
    "cluster.placement (ray)": engines_share_the_ranks_devices,
    "cluster.cpus_per_worker (ray)": refused(
        "cluster.cpus_per_worker=4.5", r"trainer 1 x 4\.5 CPU = 4\.5, the cluster has 4"
    ),
    "cluster.on_lost_node (ray)": a_lost_machine_is_waited_for_or_not,
    "cluster.node_timeout_s (ray)": a_lost_machine_is_waited_for_or_not,
    "cluster.start_timeout_s (ray)": refused("cluster.start_timeout_s=0.05", r"within 0\.05 s"),
    "cluster.timeout_s (ray)": changed(HASTY, r"within 0\.005 s|timed out after 5ms"),
    "cluster.max_restarts (ray)": changed(HASTY, "restarted 0 times in a row"),
    "cluster.backend (ray)": refused("cluster.backend=nccl", "NCCL connects GPUs"),
    "cluster.env (ray)": on_ray(variables_reach_the_ranks),
}
