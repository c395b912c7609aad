"""Several engines behind a router: the run is the same for any number of them, and continues if one
of them dies, which is replaced.

In invariant mode an engine's tokens do not depend on what else is in its batch, so everything here
is compared exactly.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support import runs, tiny_rl
from tests.support.kills import children_of

from homeostat.config import RunConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import ConfigError, EngineDiedError, EngineError, NodeLostError
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.publication.several import SentToSeveral
from homeostat.run.session.replacements import Replacements
from homeostat.run.wiring.engines import dealt_devices, engine_names
from homeostat.run.wiring.hooks import Hooks

OWN = ("model.numerics=invariant", "engine.own_process=true")
MEASURED = ("time", "throughput/", "memory/", "engine/", "sync/")


def several(folder: Path, size: int, *overrides: str) -> RunConfig:
    sizes = (f"engine.data_parallel_size={size}", "trainer.max_steps=4", "sync.timeout_s=20")
    return tiny_rl.config(folder, *OWN, *sizes, *overrides)


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in read_metrics(config.run_dir / "metrics.jsonl")
    ]


def assert_equal(one: RunConfig, other: RunConfig) -> None:
    assert comparable(one) == comparable(other)
    assert runs.final_tensors(one) == runs.final_tensors(other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunConfig:
    config = several(folder, 1, "name=alone")
    runs.train(config)
    return config


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_run_is_bitwise_the_same_for_any_number_of_engines(
    folder: Path, alone: RunConfig, size: int
) -> None:
    config = several(folder, size, f"name=of{size}", "engine.sleep=true")
    runs.train(config)
    assert_equal(config, alone)
    logs = [config.run_dir / f"{name}.log" for name in engine_names(config.engine)]
    assert len(logs) == size
    assert all(log.is_file() for log in logs)
    published = runs.events(config, "weights_published")
    assert [event["version"] for event in published] == [0, 1, 2, 3, 4]


class Killing(Hooks):
    """Kills engines of the router before a step."""

    def __init__(self, *, step: int, engines: int) -> None:
        self.step = step
        self.num_engines = engines

    def before_step(self, step: int, parts: Any) -> None:
        if step == self.step:
            for engine in list(parts.engine.engines)[: self.num_engines]:
                kill(engine)


def kill(engine: RemoteEngine) -> None:
    """End the worker of an engine by SIGKILL."""
    for launcher in engine._group._started.launchers:  # type: ignore[attr-defined]
        for worker in children_of(launcher.pid):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    ("transport", "dead"),
    [("collective", 1), pytest.param("shared_memory", 2, marks=pytest.mark.slow)],
)
def test_an_engine_that_dies_is_replaced_and_changes_nothing(
    folder: Path, alone: RunConfig, transport: str, dead: int
) -> None:
    """With `dead` 2, nobody is left: the run waits for a replacement."""
    config = several(folder, 2, f"name=dies{dead}", f"sync.transport.type={transport}")
    runs.train(config, hooks=Killing(step=2, engines=dead))
    assert_equal(config, alone)
    assert len(runs.events(config, "engine_lost")) == dead
    assert len(runs.events(config, "engine_restarted")) == dead
    joined = runs.events(config, "engine_joined")
    assert 1 <= len(joined) <= dead
    assert joined[0]["name"] in ("engine1", "engine2")


@pytest.mark.slow
def test_a_replacement_ends_with_the_ranks_that_were_to_send_it_weights(
    folder: Path, alone: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = SentToSeveral._send_alone, []

    def lose_ranks(self: SentToSeveral, engine: RemoteEngine) -> None:
        if not left:
            left.append(engine)
            raise NodeLostError("a machine of the trainer is gone")
        plain(self, engine)

    monkeypatch.setattr(SentToSeveral, "_send_alone", lose_ranks)
    config = several(folder, 2, "name=lost_ranks")
    runs.train(config, hooks=Killing(step=2, engines=2))
    assert left[0].life.is_closed
    assert runs.final_tensors(config) == runs.final_tensors(alone)


def test_without_restarts_the_others_go_on_alone(folder: Path, alone: RunConfig) -> None:
    config = several(folder, 2, "name=no_restart", "engine.max_restarts=0")
    runs.train(config, hooks=Killing(step=2, engines=1))
    assert_equal(config, alone)
    (lost,) = runs.events(config, "engine_lost")
    assert lost["left"] == 1
    assert not runs.events(config, "engine_restarted")
    assert not runs.events(config, "engine_joined")


def test_several_engines_need_processes_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.data_parallel_size") as found:
        tiny_rl.config(tmp_path, "engine.data_parallel_size=2")
    assert "engine.own_process=true" in str(found.value)


def test_devices_are_dealt_in_order_and_shared_by_native_engines_alone() -> None:
    vllm = VllmEngineConfig(type="vllm", data_parallel_size=2, tensor_parallel_size=2)
    assert dealt_devices(["4", "5", "6", "7"], vllm, number=1) == ["6", "7"]
    with pytest.raises(EngineError, match=r"need 4 devices, and 3 are visible"):
        dealt_devices(["0", "1", "2"], vllm, number=0)
    native = NativeEngineConfig(data_parallel_size=3, own_process=True)
    assert [dealt_devices(["a", "b"], native, number=n) for n in range(3)] == [["a"], ["b"], ["a"]]


def test_a_start_that_fails_in_the_background_is_handed_over() -> None:
    def start(name: str) -> RemoteEngine:
        raise EngineDiedError(f"{name} died")

    replacements = Replacements(start, timeout_s=20)
    assert replacements.take(wait=False) is None
    replacements.begin("engine2")
    found = replacements.take(wait=True)
    assert found is not None
    assert found[0] == "engine2"
    assert isinstance(found[1], EngineDiedError)
    assert replacements.num_starting == 0
    replacements.close()


def test_a_start_that_takes_too_long_is_named() -> None:
    replacements = Replacements(lambda name: pytest.fail("never"), timeout_s=0.05)
    with pytest.raises(EngineError, match=r"waited 0\.05 s.*engine\.start_timeout_s"):
        replacements.take(wait=True)
