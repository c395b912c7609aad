"""Runs whose processes are placed by Ray: bitwise those of torchrun, on two nodes, as hard to hurt.

Two raylets on loopback addresses stand for two machines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import ranks, ray_nodes, runs, tiny, tiny_rl

from homeostat.config import RunConfig
from homeostat.errors import ConfigError
from homeostat.rollout.remote import RemoteEngine

pytestmark = pytest.mark.ranks

# Each node has room for two workers.
NODE_CPUS = 2
RL = {
    "model": {"numerics": "invariant"},
    "engine": {"own_process": True, "max_restarts": 3},
    "sync": {"transport": {"type": "collective"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    pytest.importorskip("ray")
    with ray_nodes.two_nodes(cpus=NODE_CPUS) as nodes:
        yield nodes.address


def over_ray(address: str, **keys: Any) -> tuple[str, ...]:
    """Overrides that have Ray place two trainer ranks, and engines."""
    settings = {"type": "ray", "address": address, "processes": 2, "nodes": 2, **keys}
    text = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return (f"cluster={{{text}}}", "trainer.backend={type: fsdp}")


def sft(folder: Path, *overrides: str, name: str) -> RunConfig:
    return tiny.config(folder, *overrides, name=name, trainer={"max_steps": 3})


def grpo(folder: Path, *overrides: str, name: str) -> RunConfig:
    return tiny_rl.config(folder / "rl", *overrides, name=name, **RL)


def own_processes() -> set[int]:
    return ranks.descendants(os.getpid())


@pytest.fixture(scope="module")
def grpo_by_torchrun(folder: Path) -> RunConfig:
    config = grpo(folder, *ranks.over(2), name="grpo_torchrun")
    with ranks.forked():
        runs.train(config)
    return config


@pytest.mark.slow
def test_sft_on_two_nodes_is_bitwise_the_run_of_torchrun(folder: Path, address: str) -> None:
    """A rank on each node: every worker takes a whole one."""
    before = own_processes()
    placed = sft(folder, *over_ray(address, cpus_per_worker=NODE_CPUS), name="sft_ray")
    runs.train(placed)
    assert ranks.all_gone(own_processes() - before)
    here = sft(folder, *ranks.over(2), name="sft_torchrun")
    with ranks.forked():
        runs.train(here)
    assert runs.losses(placed) == runs.losses(here)
    assert runs.final_tensors(placed) == runs.final_tensors(here)


def test_grpo_with_its_engine_on_the_other_node_survives_the_engines_death(
    folder: Path, address: str, grpo_by_torchrun: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks fill one node, so that the engine is on the other."""
    before, killed = own_processes(), []
    poll = RemoteEngine.poll

    def poll_after_a_kill(self: RemoteEngine, *, timeout_s: float) -> list[Any]:
        if not killed and self.policy_version == 1:
            guardian = ray_nodes.guardians("engine")[0]
            killed.append(guardian)
            os.kill(guardian, signal.SIGKILL)
        return poll(self, timeout_s=timeout_s)

    monkeypatch.setattr(RemoteEngine, "poll", poll_after_a_kill)
    config = grpo(folder, *over_ray(address), name="grpo_ray")
    runs.train(config)
    assert len(killed) == 1
    assert len(runs.events(config, "engine_restarted")) == 1
    assert ranks.all_gone(own_processes() - before)
    assert runs.losses(config) == runs.losses(grpo_by_torchrun)
    assert runs.final_tensors(config) == runs.final_tensors(grpo_by_torchrun)
    words = (config.run_dir / "workers.log").read_text()
    assert words == "" or words.startswith("[trainer ")


def test_what_can_never_be_placed_is_refused_with_the_sum(folder: Path, address: str) -> None:
    config = grpo(folder, *over_ray(address, processes=4), name="too_large")
    with pytest.raises(ConfigError) as caught:
        runs.train(config)
    assert "trainer 4 x 1 CPU + engines 1 x 1 CPU = 5, the cluster has 4." in str(caught.value)


def test_nodes_that_do_not_come_are_told_of(folder: Path, address: str) -> None:
    few = over_ray(address, nodes=3, start_timeout_s=1.0)
    with pytest.raises(
        ConfigError, match=r"cluster\.nodes: 3 machines .* 127\.0\.0\.2, 127\.0\.0\.3"
    ):
        runs.train(sft(folder, *few, name="few"))
