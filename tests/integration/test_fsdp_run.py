"""Runs whose trainer is spread over ranks: equal to local ones, and as hard to hurt."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import ranks, runs, tiny, tiny_rl

from homeostat.config import RunConfig
from homeostat.errors import OutOfMemoryHaltError
from homeostat.observe.jsonl import read_metrics
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.sharded import ShardedTrainer

pytestmark = pytest.mark.ranks

STEADY = {"max_steps": 10, "schedule": {"type": "constant", "warmup_steps": 0}}


def config_of(folder: Path, *overrides: str, name: str = "run", **trainer: Any) -> RunConfig:
    return tiny.config(folder, *overrides, name=name, trainer={**STEADY, **trainer})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def local(folder: Path) -> list[float]:
    """The losses of ten steps in one process."""
    config = config_of(folder, name="local")
    runs.train(config)
    return runs.losses(config)


def saved_steps(config: RunConfig) -> list[int]:
    return CheckpointStore(config.run_dir / "checkpoints").steps()


def own_processes() -> set[int]:
    return ranks.descendants(os.getpid())


def test_a_run_goes_on_over_any_number_of_ranks(folder: Path, local: list[float]) -> None:
    """2 -> 1 -> local, every two steps. More ways: bench/resume_ranks.py, parity/test_fsdp.py."""
    before = own_processes()
    layouts = [ranks.over(2), ranks.over(1), ()]
    with ranks.forked():
        for leg, layout in enumerate(layouts, 1):
            config = config_of(folder, *layout, name="wandering", max_steps=2 * leg)
            assert runs.train(config).step == 2 * leg
    assert runs.losses(config) == pytest.approx(local[:6], rel=1e-5)
    assert {event["path"] for event in runs.events(config, "config_changed")} == {
        "trainer.max_steps"
    }
    assert ranks.all_gone(own_processes() - before)


def during(step: int, method: str, action: Callable[[], None]) -> Callable[..., Any]:
    """The method, which does something else first at that step."""
    original = getattr(ShardedTrainer, method)

    def altered(self: ShardedTrainer, *args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] == step:
            action()
        return original(self, *args, **kwargs)

    return altered


def test_a_rank_out_of_memory_halts_the_run_with_what_would_help(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = big_recipe(folder / "big")
    config = tiny.build_config(raw, [*ranks.over(2), "trainer.max_steps=2"], file=None)
    before = own_processes()
    # What the first step frees is returned at once, so that the second one asks for it again.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MIMALLOC_DISALLOW_ARENA_ALLOC", "1")
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "0")

    def starve() -> None:
        pid = ranks.rank_pids(os.getpid())[1]
        # Room for small things: what is asked for next is larger.
        limit = ranks.address_space(pid) + 20 * 2**20
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    # Not in the first step: a library of products takes its own memory there, and aborts without.
    monkeypatch.setattr(ShardedTrainer, "accumulate", during(2, "accumulate", starve))
    started = time.monotonic()
    with pytest.raises(OutOfMemoryHaltError, match="Settings to try") as caught:
        runs.train(config)
    assert time.monotonic() - started < 90
    assert "trainer.max_tokens_per_device=" in str(caught.value)
    assert ranks.all_gone(own_processes() - before)


def big_recipe(folder: Path) -> dict[str, Any]:
    tiny.write_model(folder / "model", hidden_size=256, intermediate_size=1024)
    sizes = {"max_steps": 1, "batch_rows": 40, "max_tokens_per_device": 8192}
    return tiny.recipe(folder, trainer=sizes)


def test_rl_over_ranks_learns_as_in_one_process(folder: Path) -> None:
    """With a reference, and weights that go from rank 0 to the engine by two kinds of buckets."""
    common = (
        "engine.own_process=true",
        "sync={transport: {type: collective}, interval: 4}",
        "algorithm.kl={coefficient: 0.05}",
        "reference={type: initial, refresh_steps: 2}",
    )
    before = own_processes()
    place = folder / "rl"
    place.mkdir()
    one = tiny_rl.config(place, "name=one", *common)
    two = tiny_rl.config(place, "name=two", *common, *ranks.over(2))
    with ranks.forked():
        for config in (one, two):
            runs.train(config)
    rewards = [[r["reward"] for r in read_metrics(c.run_dir / "metrics.jsonl")] for c in (one, two)]
    assert rewards[0] == rewards[1]
    assert runs.losses(two) == pytest.approx(runs.losses(one), rel=1e-4, abs=1e-6)
    assert ranks.all_gone(own_processes() - before)


SIGNAL_AT_3 = """
import os, signal
from homeostat.train.sharded import ShardedTrainer
original = ShardedTrainer.apply
def apply(self, role, *, step, learning_rate):
    if step == 3:
        open('ranks.txt', 'w').write(' '.join(map(str, descendants(os.getpid()))))
        os.kill(os.getpid(), signal.{name})
    return original(self, role, step=step, learning_rate=learning_rate)
ShardedTrainer.apply = apply
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_the_end_of_the_controller_is_the_end_of_its_ranks(tmp_path: Path, name: str) -> None:
    place = tmp_path / "pids.txt"
    prelude = (
        f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from tests.support.ranks import descendants\n"
        + SIGNAL_AT_3.format(name=name).replace("'ranks.txt'", repr(str(place)))
    )
    raw = tiny.recipe(tmp_path)
    process = runs.start(raw, tmp_path, *ranks.over(2), prelude=prelude)
    output, _ = process.communicate(timeout=120)
    number = signal.Signals[name]
    assert process.returncode == (-number if name == "SIGKILL" else 128 + number), output
    pids = set(map(int, place.read_text().split()))
    assert len(pids) >= 5, "torchrun, and two processes of each rank"
    assert ranks.all_gone(pids)
    config = tiny.config(tmp_path)
    assert saved_steps(config)[-1] == (2 if name == "SIGKILL" else 3)
    assert bool(runs.events(config, "run_stopped")) == (name == "SIGTERM")
