"""Ranks, backends, addresses: what is refused, and what may change when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import homeostat
from homeostat.config import RunConfig
from homeostat.config.cluster import LOOPBACK, FsdpBackend
from homeostat.config.combinations.sequence import _one_host
from homeostat.config.loading.load import build_config
from homeostat.config.loading.resume import compare_configs, experiment_digest
from homeostat.config.mesh import Mesh
from homeostat.errors import ConfigError

TWO_RANKS = ("cluster={type: torchrun, processes: 2}", "trainer.backend={type: fsdp}")
FOUR_RANKS = ("cluster={type: torchrun, processes: 4}", "trainer.backend={type: fsdp}")
HYBRID = "trainer.backend={type: fsdp, shard: hybrid, replicas: 2}"
CP, SP = "trainer.backend.context_parallel_size", "trainer.backend.sequence_parallel_size"
BALANCED = ("model.moe.aux_loss_coefficient=0.001",)
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
        (
            (*FOUR_RANKS, "trainer.backend.expert_parallel_size=3"),
            "trainer.backend.expert_parallel_size",
            "divisor of 4",
        ),
        (
            (*FOUR_RANKS, HYBRID, "trainer.backend.expert_parallel_size=4"),
            "trainer.backend.expert_parallel_size",
            "divisor of 2",
        ),
        ((*FOUR_RANKS, f"{CP}=3"), CP, "multiple of 3"),
        ((*FOUR_RANKS, f"{CP}=2", f"{SP}=4"), SP, "multiple of 8"),
        ((*TWO_RANKS, f"{CP}=2", "model.numerics=invariant"), CP, SP),
        ((*TWO_RANKS, f"{CP}=2", "trainer.share_prompts=true"), "trainer.share_prompts", SP),
        (
            (*TWO_RANKS, f"{SP}=2", *BALANCED, "model.moe.balancing=sequence_aux"),
            "model.moe.balancing",
            "Use aux",
        ),
        (
            (*TWO_RANKS, f"{CP}=2", "model.moe.capacity_factor=1.5"),
            "model.moe.capacity_factor",
            "Remove it",
        ),
        (
            (*TWO_RANKS, f"{SP}=2", "trainer.max_tokens_per_device=100", "data.max_length=201"),
            "trainer.max_tokens_per_device",
            CP,
        ),
        (
            (*TWO_RANKS, "trainer.backend.offload_params=true"),
            "trainer.backend.offload_params",
            "offload_optimizer=true",
        ),
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


def test_ranks_that_share_rows_multiply_the_budget_of_a_micro_batch() -> None:
    sizes = (f"{CP}=2", f"{SP}=2", "trainer.max_tokens_per_device=100", "data.max_length=400")
    shared = build(*FOUR_RANKS, *sizes)
    assert shared.mesh == Mesh(cp=2, sp=2)
    assert shared.mesh.num_data_groups == 1
    assert shared.trainer.tokens_per_micro_batch == 400
    assert not shared.trainer.shares_prompts
    assert "context parallel 2, prompts not shared, sequence parallel 2" in shared.ranks_line
    assert build(*TWO_RANKS, f"{SP}=2").trainer.shares_prompts
    build(*TWO_RANKS, f"{SP}=2", "model.numerics=invariant", "trainer.precision=fp32")
    build(*TWO_RANKS, f"{CP}=2", *BALANCED, "model.moe.balancing=aux")


def test_ranks_that_exchange_heads_are_on_one_machine() -> None:
    backend = build(*FOUR_RANKS, f"{SP}=4").trainer.backend
    assert isinstance(backend, FsdpBackend)
    assert list(_one_host(backend, 8)) == []
    (problem,) = _one_host(backend, 6)
    assert "6 = 1 x 4 + 2" in problem.message
    assert CP in problem.hint


def test_ranks_that_share_experts_are_counted_before_the_start() -> None:
    shared = build(*FOUR_RANKS, "trainer.backend.expert_parallel_size=2")
    assert shared.mesh == Mesh(shard=4, ep=2)
    assert shared.mesh.num_expert_shards == 2
    assert shared.mesh.world_size == 4
    assert shared.ranks_line == "4 ranks (fsdp, full shard, experts over 2)"
    with pytest.raises(ConfigError, match=r"shard 4 x cp 1 = 4, and 4 % 3 = 1"):
        build(*FOUR_RANKS, "trainer.backend.expert_parallel_size=3")


def test_low_memory_offloads_what_a_gpu_or_ranks_hold() -> None:
    assert not build("preset=low_memory").trainer.backend.offload_optimizer
    for where in (("trainer.device=cuda",), TWO_RANKS):
        backend = build("preset=low_memory", *where).trainer.backend
        assert (backend.offload_params, backend.offload_optimizer) == (True, True)
    # It gives way to what it cannot work with.
    shared = build("preset=low_memory", "trainer.device=cuda", *GRPO).trainer.backend
    assert (shared.offload_params, shared.offload_optimizer) == (False, True)
    kept = build("preset=low_memory", *TWO_RANKS, "trainer.backend.offload_optimizer=false")
    assert (kept.trainer.backend.offload_params, kept.trainer.backend.type) == (False, "fsdp")


def test_a_run_may_go_on_over_other_ranks() -> None:
    layouts = [build(), build(*TWO_RANKS), build(*FOUR_RANKS, "cluster.timeout_s=60")]
    layouts += [build(*TWO_RANKS, f"{CP}=2"), build(*FOUR_RANKS, f"{SP}=2", f"{CP}=2")]
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
