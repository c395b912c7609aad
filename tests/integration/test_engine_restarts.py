"""An engine's process may die at any moment of its life-cycle: each death costs one restart and
nothing else, until none is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support import mortal_engine, runs, tiny_rl
from tests.support.patience import patiently

from homeostat.config import RunConfig
from homeostat.errors import EngineError
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout import remote
from homeostat.rollout.registry import ENGINES
from homeostat.workers.launchers import spawn
from homeostat.workers.opening import LAUNCHERS
from homeostat.workers.processes import open_processes

OWN = ("model.numerics=invariant", "engine.own_process=true")
STEPS = "trainer.max_steps=3"
# What a clock or another process decides, or only one of the engines has.
MEASURED = ("time", "throughput/", "memory/", "engine/", "sync/")

Mortal = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunConfig:
    """The run with the engine that shares the trainer's weights."""
    config = tiny_rl.config(folder, "name=undisturbed", OWN[0], STEPS)
    runs.train(config)
    return config


def made_by(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes are made by another factory."""
    monkeypatch.setitem(ENGINES, "native", replace(ENGINES["native"], factory=factory))


@pytest.fixture
def mortal(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mortal:
    """The config of a run whose engine processes die by a plan."""

    def planned(moments: list[str | None], *overrides: str) -> RunConfig:
        plan = mortal_engine.write_plan(tmp_path / "plan.json", moments)
        monkeypatch.setenv(mortal_engine.PLAN, str(plan))
        made_by(mortal_engine.FACTORY, monkeypatch)
        launch = mortal_engine.killing_launcher(spawn)
        monkeypatch.setitem(LAUNCHERS, "spawn", partial(open_processes, launch=launch))
        return tiny_rl.config(folder, f"name={tmp_path.name}", OWN[0], STEPS, *overrides)

    return planned


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in read_metrics(config.run_dir / "metrics.jsonl")
    ]


def assert_equal(one: RunConfig, other: RunConfig) -> None:
    assert comparable(one) == comparable(other)
    assert runs.final_tensors(one) == runs.final_tensors(other)


def train_through(config: RunConfig, moments: list[str | None], undisturbed: RunConfig) -> None:
    """Every death is a restart that is counted and named, and changes nothing."""
    runs.train(config)
    deaths = [moment for moment in moments if moment is not None]
    found = runs.events(config, "engine_restarted")
    assert [event["restarts"] for event in found] == list(range(1, len(deaths) + 1))
    for moment, event in zip(deaths, found, strict=True):
        if moment.endswith(" stop"):
            assert "engine's process hangs: no answer to" in event["error"]
            assert "rank 0 lags: its process is stopped by a signal" in event["error"]
            continue
        assert "SIGKILL" in event["error"]
        words = "before rank 0 had started" if moment == "spawn" else mortal_engine.LAST_WORDS
        assert words in event["error"], moment
    assert_equal(config, undisturbed)


# Each process that lives long enough to import torch takes seconds.
AT_STARTS: dict[str, list[str | None]] = {
    "once each": ["spawn", "poll 2", None],
    "more": ["spawn", "poll 2", "spawn", "load", "apply 1", None],
}


@pytest.mark.parametrize("when", ["once each", pytest.param("more", marks=pytest.mark.slow)])
def test_a_death_while_it_starts_or_is_started_again_costs_one_restart(
    mortal: Mortal, undisturbed: RunConfig, when: str
) -> None:
    moments = AT_STARTS[when]
    train_through(mortal(moments, OWN[1], "engine.max_restarts=5"), moments, undisturbed)


HANGS = ["poll 2 stop", "apply 2 stop", "score 1 stop", "sleep 1 stop", "submit 3 stop"]


@pytest.mark.parametrize(
    "moment", [HANGS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in HANGS[1:])]
)
def test_a_process_that_hangs_is_restarted_like_one_that_died(
    mortal: Mortal, undisturbed: RunConfig, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0.2)

    def check(limit_s: float) -> None:
        limits = (f"engine.stall_s={limit_s}", f"sync.timeout_s={2 * limit_s}")
        config = mortal([moment, None], OWN[1], *limits, "engine.sleep=true")
        shutil.rmtree(config.run_dir, ignore_errors=True)
        train_through(config, [moment, None], undisturbed)

    patiently(check)


MOMENTS: dict[str, list[str | None]] = {
    "first publication": ["built", "connect 1", "begin_update 1", "commit 1", "score 1", None],
    "publication after a restart": ["poll 3", "connect 1", "apply 2", "commit 1", "score 1", None],
    "later publication": ["begin_update 2", "apply 3", "commit 2", "score 2", None],
    "sampling": ["submit 3", "poll 1", "built", "poll 1", None],
    "sleep": ["sleep 1", "sleep 1", "connect 1", "sleep 2", None],
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "disk"])
@pytest.mark.parametrize("when", MOMENTS)
def test_a_death_at_any_moment_costs_one_restart(
    mortal: Mortal, undisturbed: RunConfig, when: str, transport: str
) -> None:
    moments = MOMENTS[when]
    more = [f"sync.transport={{type: {transport}, bucket_bytes: 20000}}"]
    more += ["engine.sleep=true"] if when == "sleep" else []
    config = mortal(moments, OWN[1], f"engine.max_restarts={len(moments) - 1}", *more)
    train_through(config, moments, undisturbed)


@pytest.mark.parametrize(
    "when", ["at the first start", pytest.param("at a restart", marks=pytest.mark.slow)]
)
def test_a_run_halts_only_after_the_last_restart(
    mortal: Mortal, undisturbed: RunConfig, when: str
) -> None:
    alive: list[str | None] = ["poll 2"] if when == "at a restart" else []
    most = f"engine.max_restarts={2 + len(alive)}"
    config = mortal([*alive, "spawn", "spawn", "load"], OWN[1], most)
    with pytest.raises(EngineError, match=r"engine\.max_restarts") as caught:
        runs.train(config)
    told = str(caught.value)
    assert f"already restarted {2 + len(alive)} times" in told
    assert f"{mortal_engine.LAST_WORDS} load" in told
    assert "SIGKILL" in told
    assert len(runs.events(config, "engine_restarted")) == 2 + len(alive)


@pytest.mark.slow
def test_a_run_that_halted_goes_on_to_the_same_bits(mortal: Mortal, undisturbed: RunConfig) -> None:
    config = mortal(["poll 4", "load", None], OWN[1], "engine.max_restarts=1")
    with pytest.raises(EngineError, match=r"engine\.max_restarts"):
        runs.train(config)
    runs.train(config)
    assert_equal(config, undisturbed)


def test_an_engine_that_refuses_to_start_is_not_started_again(
    mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its factory raises would be raised again."""
    config = mortal([None], OWN[1])
    made_by("tests.support.mortal_engine:no_such_factory", monkeypatch)
    with pytest.raises(EngineError, match="no_such_factory"):
        runs.train(config)
    assert runs.events(config, "engine_restarted") == []


@pytest.mark.parametrize(
    "moment",
    ["spawn", *(pytest.param(m, marks=pytest.mark.slow) for m in ("load", "apply 1", "poll 2"))],
)
def test_a_helper_that_dies_is_done_without(
    mortal: Mortal, undisturbed: RunConfig, moment: str
) -> None:
    config = mortal([moment], "engine.processes=2")
    runs.train(config)
    (lost,) = runs.events(config, "helper_lost")
    assert "SIGKILL" in lost["error"]
    assert_equal(config, undisturbed)
