"""Ranks, backends, addresses: what is refused, and what may change when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import homeostat
from homeostat.config import RunConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.config.load import build_config
from homeostat.config.mesh import Mesh
from homeostat.config.resume import compare_configs, experiment_digest
from homeostat.errors import ConfigError

TWO_RANKS = ("cluster={type: torchrun, processes: 2}", "trainer.backend={type: fsdp}")
FOUR_RANKS = ("cluster={type: torchrun, processes: 4}", "trainer.backend={type: fsdp}")
GRPO = (
    "algorithm={type: grpo}",
    "data.train=[{type: prompts, path: p.jsonl}]",
    "rewards={functions: [{type: exact_match, column: answer}]}",
)


def build(*overrides: str) -> RunConfig:
    raw = {
        "name": "run",
        "model": {"path": "m"},
        "data": {"train": [{"type": "messages", "path": "d.jsonl"}]},
    }
    return build_config(raw, list(overrides), file=None)


@pytest.mark.parametrize(
    ("overrides", "place", "way_out"),
    [
        (TWO_RANKS[:1], "cluster.type", "trainer.backend.type=fsdp"),
        (TWO_RANKS[1:], "trainer.backend.type", "cluster.type=torchrun"),
        ((*TWO_RANKS, "trainer.backend.shard=hybrid"), "trainer.backend.replicas", "divisor"),
        ((*TWO_RANKS, "trainer.backend.replicas=2"), "trainer.backend.replicas", "shard=hybrid"),
        (
            (*FOUR_RANKS, "trainer.backend.shard=hybrid", "trainer.backend.replicas=3"),
            "trainer.backend.replicas",
            "divisor",
        ),
        (
            (*TWO_RANKS, "model.implementation=transformers"),
            "model.implementation",
            "implementation=native",
        ),
        ((*TWO_RANKS, "model.meta_init=false"), "model.meta_init", "true"),
        ((*TWO_RANKS, "trainer.on_oom=halve"), "trainer.on_oom", "Remove it"),
        (
            (*TWO_RANKS, "observe.profiler={steps: [1]}", "trainer.max_steps=2"),
            "observe.profiler",
            "in_process",
        ),
        ((*TWO_RANKS, *GRPO), "engine.type", "engine.own_process=true"),
    ],
)
def test_what_cannot_work_over_ranks_is_refused_with_the_way_out(
    overrides: tuple[str, ...], place: str, way_out: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(*overrides)
    (problem,) = caught.value.problems
    assert problem.place == place
    assert way_out in problem.hint


def test_what_works_over_ranks_is_accepted() -> None:
    assert build().mesh == Mesh()
    assert build(*FOUR_RANKS).mesh == Mesh(shard=4)
    hybrid = ("trainer.backend.shard=hybrid", "trainer.backend.replicas=2")
    assert build(*FOUR_RANKS, *hybrid).mesh == Mesh(replicate=2, shard=2)
    assert build(*FOUR_RANKS, *hybrid).ranks_line == "4 ranks (fsdp, hybrid shard, 2 replicas)"
    assert build(*TWO_RANKS, "trainer.on_oom=halt").ranks_line == "2 ranks (fsdp, full shard)"
    build(*TWO_RANKS, *GRPO, "engine.own_process=true")
    build(*TWO_RANKS, "trainer.precision=fp32", "model.numerics=invariant")


def test_a_run_may_go_on_over_other_ranks() -> None:
    layouts = [build(), build(*TWO_RANKS), build(*FOUR_RANKS, "cluster.timeout_s=60")]
    for old in layouts:
        for new in layouts:
            assert {change.resume for change in compare_configs(old, new)} <= {"free"}
    assert len({experiment_digest(config) for config in layouts}) == 1


def test_addresses_come_from_the_cluster_alone() -> None:
    """Whoever opens a socket is told where; only the cluster's own file names an address."""
    package = Path(homeostat.__file__).parent
    naming = [file for file in package.rglob("*.py") if LOOPBACK in file.read_text()]
    assert [file.relative_to(package).as_posix() for file in naming] == ["config/ranks.py"]
    assert {build().cluster.host, build(*TWO_RANKS).cluster.host} == {LOOPBACK}


def test_engines_have_a_process_of_their_own_whatever_the_trainer_has() -> None:
    alone, ranks = build().cluster, build(*TWO_RANKS).cluster
    assert [alone.launcher(kind) for kind in ("trainer", "engine")] == ["in_process", "spawn"]
    assert [ranks.launcher(kind) for kind in ("trainer", "engine")] == ["torchrun", "spawn"]
