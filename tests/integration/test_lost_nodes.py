"""A machine that disappears from a Ray cluster: the run waits for another one, or shrinks.

Raylets on loopback addresses stand for machines. One that is lost is killed with all that it
started, in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support import ranks, ray_nodes, runs, tiny, tiny_rl

from homeostat.config import RunConfig
from homeostat.errors import WorkerError
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.ray.machines import Machines
from homeostat.run.session import restarts
from homeostat.train.sharded import ShardedTrainer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

STEADY = {"max_steps": 5, "schedule": {"type": "constant", "warmup_steps": 0}}
RL = {
    "model": {"numerics": "invariant"},
    "engine": {"own_process": True, "max_restarts": 3},
    "sync": {"transport": {"type": "collective"}},
    "checkpoint": {"interval_steps": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture
def head() -> Iterator[Any]:
    """A Ray of one raylet, which soon notices that another one is gone."""
    pytest.importorskip("ray")
    cluster = ray_nodes.one_node(cpus=2, **ray_nodes.SOON)
    yield cluster
    cluster.shutdown()


def over_ray(head: Any, **keys: Any) -> tuple[str, ...]:
    """Overrides that have Ray place trainer ranks on two machines."""
    settings = {"type": "ray", "address": head.address, "nodes": 2, "timeout_s": 120, **keys}
    text = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return (f"cluster={{{text}}}", "trainer.backend={type: fsdp}")


def sft(folder: Path, *overrides: str, name: str) -> RunConfig:
    return tiny.config(folder, *overrides, name=name, trainer=STEADY)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunConfig:
    config = sft(folder, *ranks.over(2), name="undisturbed")
    with ranks.forked():
        runs.train(config)
    return config


def lose_at(step: int, head: Any, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a machine disappear when the gradient of a step is about to be computed."""
    plain = ShardedTrainer.accumulate
    lost: list[Any] = []

    def accumulate(self: ShardedTrainer, *args: Any, **named: Any) -> Any:
        if named["step"] == step and not lost:
            lost.append(node)
            ray_nodes.lose(head, node)
        return plain(self, *args, **named)

    monkeypatch.setattr(ShardedTrainer, "accumulate", accumulate)


@pytest.mark.slow
def test_a_run_that_waits_ends_with_the_same_bits(
    folder: Path, head: Any, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank takes a whole machine. Another machine comes in place of the one that is lost."""
    node = ray_nodes.add_node(head, "127.0.0.3", cpus=2)
    config = sft(folder, *over_ray(head, processes=2, cpus_per_worker=2), name="waits")
    lose_at(4, head, node, monkeypatch)
    waited = Machines._waited

    def waited_for_another(self: Machines, began: float) -> Any:
        another.enter_context(ray_nodes.joining(head.address, "127.0.0.4", cpus=2))
        return waited(self, began)

    monkeypatch.setattr(Machines, "_waited", waited_for_another)
    with ExitStack() as another:
        assert runs.train(config).step == 5
    (lost,) = runs.events(config, "node_lost")
    assert (lost["nodes"], lost["action"]) == (["127.0.0.3"], "wait")
    assert lost["missing"] == "2 CPU missing: trainer 2 x 2 CPU = 4, the cluster has 2"
    assert lost["until"].endswith(" UTC")
    (back,) = runs.events(config, "cluster_restored")
    assert (back["ranks"], back["engines"]) == (2, 0)
    assert runs.losses(config) == runs.losses(undisturbed)
    assert runs.final_tensors(config) == runs.final_tensors(undisturbed)


def test_a_run_that_shrinks_has_the_same_losses(
    folder: Path, head: Any, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ray_nodes.add_node(head, "127.0.0.3", cpus=2)
    keys = {"processes": 2, "cpus_per_worker": 2, "on_lost_node": "shrink"}
    config = sft(folder, *over_ray(head, **keys), name="shrinks")
    lose_at(4, head, node, monkeypatch)
    assert runs.train(config).step == 5
    (lost,) = runs.events(config, "node_lost")
    assert (lost["nodes"], lost["action"]) == (["127.0.0.3"], "shrink")
    (shrunk,) = runs.events(config, "cluster_shrunk")
    assert (shrunk["ranks_before"], shrunk["ranks_now"]) == (2, 1)
    losses, expected = runs.losses(config), runs.losses(undisturbed)
    assert len(losses) == 5
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_machine_that_does_not_come_back_ends_the_run_in_time(
    folder: Path, head: Any, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved is resumed by fewer ranks."""
    node = ray_nodes.add_node(head, "127.0.0.3", cpus=2)
    keys = {"processes": 2, "cpus_per_worker": 2, "node_timeout_s": 0.5}
    config = sft(folder, *over_ray(head, **keys), name="alone")
    with monkeypatch.context() as patched:
        lose_at(4, head, node, patched)
        with pytest.raises(WorkerError) as caught:
            runs.train(config)
    told = str(caught.value)
    assert told.startswith("127.0.0.3 (2 CPU) left the Ray cluster, which has 127.0.0.2 now.")
    assert "No machine came within 0.5 s (cluster.node_timeout_s)" in told
    smaller = over_ray(head, processes=1, nodes=1, cpus_per_worker=2)
    assert runs.train(sft(folder, *smaller, name="alone")).step == 5
    assert runs.losses(config) == pytest.approx(runs.losses(undisturbed), rel=1e-6)


@pytest.mark.slow
def test_ranks_make_room_for_an_engine_whose_machine_is_lost(
    folder: Path, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks fill the first machine, so that the engine is alone on the second."""
    node = ray_nodes.add_node(head, "127.0.0.3", cpus=1)
    poll, lost = RemoteEngine.poll, []

    def poll_after_the_loss(self: RemoteEngine, *, timeout_s: float) -> list[Any]:
        if not lost and self.policy_version == 1:
            lost.append(node)
            ray_nodes.lose(head, node)
        return poll(self, timeout_s=timeout_s)

    monkeypatch.setattr(RemoteEngine, "poll", poll_after_the_loss)
    keys = {"processes": 2, "on_lost_node": "shrink"}
    place = folder / "rl"
    config = tiny_rl.config(place, *over_ray(head, **keys), name="grpo", **RL)
    runs.train(config)
    (shrunk,) = runs.events(config, "cluster_shrunk")
    assert (shrunk["ranks_before"], shrunk["ranks_now"]) == (2, 1)
    assert (shrunk["engines_before"], shrunk["engines_now"]) == (1, 1)
    monkeypatch.undo()
    here = tiny_rl.config(place, *ranks.over(2), name="grpo_here", **RL)
    with ranks.forked():
        runs.train(here)
    found, expected = (read_metrics(one.run_dir / "metrics.jsonl") for one in (config, here))
    assert [one["reward"] for one in found] == [one["reward"] for one in expected]
    # The loss itself is a sum of terms that cancel.
    norms = [one["grad_norm"] for one in expected]
    assert [one["grad_norm"] for one in found] == pytest.approx(norms, rel=1e-5)
