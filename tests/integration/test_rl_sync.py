"""RL with an engine in a process of its own: it learns as with the shared one, and a process that
is killed, or an engine that is behind the trainer, changes nothing of what comes out.

In invariant mode engine and trainer are equal to the bit, so everything here is compared exactly.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support import runs, tiny_rl
from tests.support.kills import engine_process, kill_engine, killed_at

from homeostat.config import RunConfig
from homeostat.errors import ConfigError, EngineError
from homeostat.observe.completions import read_completions
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.learning.learn import Learner
from homeostat.run.preflight.check import Preflight

OWN = ("model.numerics=invariant", "engine.own_process=true")
# What a clock or another process decides, or only one of the engines has.
MEASURED = ("time", "throughput/", "memory/", "engine/", "rollout/replayed_rounds", "sync/")


class CrashError(Exception):
    """Ends a run where a test wants it to end."""


def records(config: RunConfig) -> list[dict[str, Any]]:
    return list(read_metrics(config.run_dir / "metrics.jsonl"))


def values(config: RunConfig, name: str) -> list[Any]:
    return [record[name] for record in records(config) if name in record]


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in records(config)
    ]


def versions(config: RunConfig) -> list[int]:
    """Per step, of the weights that sampled it."""
    found = []
    for record in records(config):
        rows = read_completions(config.run_dir / "completions", record["step"])
        (version,) = {row["policy_version"] for row in rows}
        found.append(version)
    return found


def assert_equal(one: RunConfig, other: RunConfig) -> None:
    assert runs.final_tensors(one) == runs.final_tensors(other)
    for mine, theirs in zip(comparable(one), comparable(other), strict=True):
        assert mine == theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sync")


@pytest.fixture(scope="module")
def shared(folder: Path) -> RunConfig:
    """Eight steps with the engine that shares the trainer's weights."""
    config = tiny_rl.config(
        folder, "name=shared", "model.numerics=invariant", "trainer.max_steps=8"
    )
    runs.train(config)
    return config


@pytest.mark.parametrize(
    "transport",
    [
        "shared_memory",
        pytest.param("disk", marks=pytest.mark.slow),
        pytest.param("collective", marks=pytest.mark.slow),
    ],
)
def test_it_learns_as_with_the_shared_engine(
    folder: Path, shared: RunConfig, transport: str
) -> None:
    config = tiny_rl.config(
        folder,
        f"name={transport}",
        *OWN,
        "trainer.max_steps=8",
        f"sync.transport={{type: {transport}, bucket_bytes: 20000}}",
    )
    runs.train(config)
    assert_equal(config, shared)
    assert values(config, "sampling/sampling_logp_difference/max") == [0.0] * 8
    assert versions(config) == versions(shared) == list(range(8))
    assert values(config, "sync/version") == list(range(1, 9))
    published = runs.events(config, "weights_published")
    assert [event["version"] for event in published] == list(range(9))
    assert {event["transport"] for event in published} == {transport}
    # Nothing is left of what was on its way.
    left = [path.name for path in config.run_dir.iterdir() if path.name.startswith("homeostat-")]
    assert left == []
    assert not list(config.run_dir.glob("collective-*"))


@pytest.mark.slow
def test_a_run_goes_on_with_the_weights_that_the_engine_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates a step, published after every six of them; an evaluation publishes its own."""
    changes = (
        *OWN,
        "sync.interval=6",
        "trainer.max_steps=8",
        "data.validation_share=0.25",
        "eval.interval_steps=5",
    )
    whole = tiny_rl.config(folder, "name=whole", *changes)
    runs.train(whole)
    assert versions(whole) == [0, 0, 0, 3, 3, 5, 5, 5]
    assert values(whole, "stale/steps/max") == [0, 1, 2, 0, 1, 0, 1, 2]
    assert values(whole, "eval/policy_version") == [5, 8]
    assert values(whole, "sync/version") == [3, 5, 8]
    behind, level = (whole.run_dir / "checkpoints" / f"step_{step:08d}" for step in (6, 8))
    assert not (level / "published.safetensors").exists()
    # What is kept for the engine is not what the trainer has.
    kept, own = (load_file(behind / f"{stem}.safetensors") for stem in ("published", "model"))
    assert kept.keys() == own.keys()
    assert any(not kept[name].equal(own[name]) for name in own)

    config = tiny_rl.config(folder, "name=resumed", *changes)
    crash_in_step(config, 7, monkeypatch)
    # A process that is killed on the way gets them again.
    with monkeypatch.context() as patch:
        patch.setattr(RemoteEngine, "poll", killed_after_some(RemoteEngine.poll))
        runs.train(config)
    (resumed,) = runs.events(config, "run_resumed")
    assert resumed["step"] == 6
    assert [event["step"] for event in runs.events(config, "engine_restarted")] == [7]
    assert [e["version"] for e in runs.events(config, "weights_published")] == [0, 3, 5, 5, 8]
    assert_equal(config, whole)
    assert versions(config) == versions(whole)


def crash_in_step(config: RunConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill: nothing of the step is kept but what is in the journal."""
    plain = Learner.learn

    def learn(self: Learner, now: int, *args: Any, **named: Any) -> Any:
        if now == step:
            raise CrashError
        return plain(self, now, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", learn)
        with pytest.raises(CrashError):
            runs.train(config)


# Engines that are killed.


def killed_after_some(plain: Callable[..., Any]) -> Callable[..., Any]:
    """poll, after which the engine is dead once; some of its round was handed out already."""
    kills: list[int] = []

    def dying(self: RemoteEngine, **named: Any) -> Any:
        found = plain(self, **named)
        if not kills and 0 < len(self.life.in_flight) < len(self._round):
            kills.append(len(found))
            kill_engine()
        return found

    return dying


@pytest.mark.slow
def test_an_engine_that_is_killed_is_started_anew_and_changes_nothing(
    folder: Path, shared: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_rl.config(folder, "name=killed", *OWN, "trainer.max_steps=8")
    with monkeypatch.context() as patch:
        for verb, call in (("poll", 4), ("apply", 5), ("score", 6)):
            patch.setattr(RemoteEngine, verb, killed_at(verb, call=call, within_s=0.01))
        runs.train(config)
    assert_equal(config, shared)
    restarts = runs.events(config, "engine_restarted")
    assert [event["restarts"] for event in restarts] == [1, 2, 3]
    assert all("SIGKILL" in event["error"] for event in restarts)
    assert "engine.log" in restarts[0]["error"]
    assert versions(config) == list(range(8))


@pytest.mark.slow
def test_a_dead_engine_ends_the_run_with_its_name_and_nothing_is_lost(
    folder: Path, shared: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests may keep a process of theirs.
    before = engine_process()
    config = tiny_rl.config(
        folder, "name=ended", *OWN, "trainer.max_steps=8", "engine.max_restarts=0"
    )
    with monkeypatch.context() as patch:
        patch.setattr(RemoteEngine, "poll", killed_at("poll", call=6, within_s=0.0))
        with pytest.raises(EngineError, match="engine rank 0 was ended by SIGKILL") as caught:
            runs.train(config)
    assert "runs/ended/engine.log" in str(caught.value)
    assert "engine.max_restarts" in str(caught.value)
    assert engine_process() == before
    runs.train(config)
    assert_equal(config, shared)


# What is refused, and what `check` says.


REFUSED = {
    "sync.interval": ("sync.interval=2",),
    "sync.transport": ("sync.transport={type: disk}",),
    "sync.transport (in_process)": ("sync.transport={type: in_process}",),
    "sync.verify": ("sync.verify=false",),
    "sync.timeout_s": ("sync.timeout_s=5",),
    "engine.max_restarts": ("engine.max_restarts=1",),
    "engine.start_timeout_s": ("engine.start_timeout_s=9",),
    "sync.transport.type": ("engine.own_process=true", "sync.transport={type: in_process}"),
    "engine.own_process": ("engine.own_process=true", "model.implementation=transformers"),
    "debug.mode": (
        "engine={type: vllm}",
        "rollout.temperature=0.5",
        "debug={mode: replay, rollouts: elsewhere}",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_have_no_effect_is_refused(folder: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_rl.config(folder, *REFUSED[key])
    assert key.split()[0] in {problem.place for problem in caught.value.problems}


def test_memory_of_a_gpu_is_not_handed_over_without_one(folder: Path) -> None:
    config = tiny_rl.config(folder, *OWN, "sync.transport={type: cuda_ipc}")
    with pytest.raises(ConfigError, match="cuda_ipc"):
        runs.train(config)


def test_check_says_which_way_the_weights_go(folder: Path) -> None:
    said = {}
    for name, more in (("shared", ()), ("own", ("engine.own_process=true", "sync.interval=6"))):
        preflight = Preflight(tiny_rl.config(folder, *more), progress=lambda done, total: None)
        (said[name],) = [item for item in preflight.run() if item.name == "weights"]
    assert "shares the trainer's weights" in said["shared"].text
    assert "in its own process" in said["own"].text
    assert "by shared_memory every 3 steps" in said["own"].text


def test_weights_are_rounded_for_the_engine_from_the_first_int4_step_on(tmp_path: Path) -> None:
    """Also after a resume, which samples its first step before the trainer begins one."""
    late = ("model.numerics=invariant", "trainer.int4={group_size: 32, start_step: 2}")
    late += ("trainer.max_steps=4", "checkpoint.interval_steps=1", "checkpoint.keep_last=4")
    shared = tiny_rl.config(tmp_path, "name=shared", *late)
    own = tiny_rl.config(tmp_path, "name=own", *late, "engine.own_process=true")
    for config in (shared, own):
        runs.train(config)
    assert_equal(own, shared)
    saving = own.checkpoint.model_copy(update={"load_step": 2})
    again = own.model_copy(update={"runs_dir": str(tmp_path / "again"), "checkpoint": saving})
    checkpoint = Path("checkpoints") / "step_00000002"
    shutil.copytree(own.run_dir / checkpoint, again.run_dir / checkpoint)
    runs.train(again)
    assert [record["step"] for record in records(again)] == [3, 4]
    assert runs.final_tensors(again) == runs.final_tensors(own)
