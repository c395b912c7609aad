"""The room that is left when a machine of a Ray cluster is lost, and the run that fits into it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.ray_nodes import ListedNodes

from homeostat.config.loading.load import build_config
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, NodeLostError, WorkerError
from homeostat.run.ray.machines import Machines
from homeostat.run.ray.nodes import alive_nodes
from homeostat.run.ray.placement import Node
from homeostat.run.ray.room import describe_missing, has_room, shrunk


def build(
    *overrides: str, backend: dict[str, Any] | None = None, engines: int = 0, **cluster: Any
) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "run",
        "model": {"path": "m"},
        "cluster": {"type": "ray", "address": "auto", "nodes": 2, "processes": 8, **cluster},
        "trainer": {"backend": {"type": "fsdp", **(backend or {})}},
        "data": {"train": [{"type": "messages", "path": "p.jsonl"}]},
    }
    if engines:
        raw |= {
            "algorithm": {"type": "grpo"},
            "engine": {"type": "vllm", "tensor_parallel_size": 2, "data_parallel_size": engines},
            "data": {"train": [{"type": "prompts", "path": "p.jsonl"}]},
            "rewards": {"functions": [{"type": "exact_match", "column": "answer"}]},
        }
    return build_config(raw, list(overrides), file=None)


def gpus(*counts: float) -> list[Node]:
    return [Node(f"10.0.0.{n}", {"GPU": has, "CPU": 64.0}) for n, has in enumerate(counts, 1)]


def sizes(config: RunConfig | None) -> tuple[int, int] | None:
    return None if config is None else (config.cluster.processes, config.num_engines)


@pytest.mark.parametrize(
    ("backend", "engines", "left", "expected"),
    [
        ({}, 0, (5,), (5, 0)),
        # Ranks stay a multiple of what shares a micro-batch, of replicas, and of what shares
        # experts.
        ({"context_parallel_size": 2}, 0, (5,), (4, 0)),
        ({"sequence_parallel_size": 4}, 0, (7,), (4, 0)),
        ({"expert_parallel_size": 4}, 0, (7,), (4, 0)),
        ({"shard": "hybrid", "replicas": 2}, 0, (7,), (6, 0)),
        ({"shard": "hybrid", "replicas": 2, "context_parallel_size": 2}, 0, (3,), None),
        # Two ranks that exchange heads are never on two machines.
        ({"sequence_parallel_size": 2}, 0, (3, 3), (4, 0)),
        # Trainer and engines, of two GPUs each, shrink alike.
        ({}, 4, (8,), (4, 2)),
        ({}, 4, (3,), (1, 1)),
        ({}, 4, (2,), None),
        ({}, 4, (0,), None),
    ],
)
def test_the_largest_run_that_fits(
    backend: dict[str, Any], engines: int, left: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    config = build(backend=backend, engines=engines)
    nodes = gpus(*left)
    found = shrunk(config, nodes, device="cuda")
    assert sizes(found) == expected
    assert not has_room(config.for_placement, nodes, device="cuda")
    if found is not None:
        assert has_room(found.for_placement, nodes, device="cuda")
        assert found.trainer == config.trainer


def test_engines_that_share_devices_shrink_with_the_ranks() -> None:
    config = build(engines=4, placement="colocated")
    assert sizes(shrunk(config, gpus(5), device="cuda")) == (5, 2)


def test_what_is_missing_is_told_with_the_sum() -> None:
    settings = build(engines=1).for_placement
    told = describe_missing(settings, gpus(4), device="cuda")
    assert told == "6 GPU missing: trainer 8 x 1 GPU + engines 1 x 2 GPU = 10, the cluster has 4"
    apart = build(backend={"sequence_parallel_size": 4}).for_placement
    assert not has_room(apart, gpus(6, 2), device="cuda")
    assert "no machine has room" in describe_missing(apart, gpus(6, 2), device="cuda")


class Told:
    """Collects events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def machines(ray: ListedNodes, config: RunConfig) -> Machines:
    return Machines(ray, config, device="cpu", nodes=alive_nodes(ray))


def test_a_run_shrinks_and_grows_back() -> None:
    ray, told = ListedNodes(a=4, b=4), Told()
    whole = build(on_lost_node="shrink")
    here = machines(ray, whole)
    here.require_room()
    assert here.refit(told) == whole
    assert told.events == []
    del ray.cpus["b"]
    with pytest.raises(NodeLostError, match=r"b \(4 CPU\) left .* has a now\. 4 CPU missing: "):
        here.require_room()
    assert sizes(here.refit(told)) == (4, 0)
    assert told.kinds == ["node_lost", "cluster_shrunk"]
    assert told.events[0][1]["nodes"] == ["b"]
    assert told.events[1][1] == {
        "ranks_before": 8,
        "ranks_now": 4,
        "engines_before": 0,
        "engines_now": 0,
    }
    here.require_room()
    assert sizes(here.refit(told)) == (4, 0)
    assert len(told.events) == 2
    ray.cpus["a"] = 8
    assert here.refit(told) == whole
    assert told.kinds[2:] == ["cluster_restored"]


def test_a_machine_that_is_not_needed_may_go() -> None:
    ray, told = ListedNodes(a=4, b=4, c=1), Told()
    here = machines(ray, build())
    del ray.cpus["c"]
    here.require_room()
    assert sizes(here.refit(told)) == (8, 0)
    assert told.events == []


@pytest.mark.parametrize("on_lost_node", ["wait", "shrink"])
def test_a_wait_for_machines_ends(on_lost_node: str) -> None:
    """With a mesh of four ranks, three CPUs are not enough to shrink to."""
    ray, told = ListedNodes(a=4, b=4), Told()
    keys = {"on_lost_node": on_lost_node, "node_timeout_s": 0.01}
    here = machines(ray, build(backend={"context_parallel_size": 4}, **keys))
    ray.cpus = {"a": 3}
    with pytest.raises(WorkerError, match=r"No machine came within 0\.01 s \(cluster\.node_time"):
        here.refit(told)
    ((kind, fields),) = told.events
    assert (kind, fields["action"]) == ("node_lost", "wait")
    assert fields["until"].endswith(" UTC")


def test_a_ray_of_this_machine_alone_has_no_machine_to_lose() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.on_lost_node: without cluster\.address"):
        build(on_lost_node="shrink", address=None, nodes=1)
