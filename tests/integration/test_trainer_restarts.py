"""A trainer whose ranks die or hang is started again within the same command, to the same bits."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forks, ranks, runs, tiny, tiny_rl
from tests.support.fsdp_ranks import Place

from homeostat.config import RunConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.errors import LostRanksError, WorkerError
from homeostat.observe.jsonl import read_metrics
from homeostat.run.session import restarts
from homeostat.train.fsdp.make import make_trainer
from homeostat.train.sharded import ShardedTrainer
from homeostat.types import Role
from homeostat.workers.context import WorkerContext

pytestmark = pytest.mark.ranks

STEADY = {"max_steps": 5, "schedule": {"type": "constant", "warmup_steps": 0}}
# What a clock or another process decides.
MEASURED = ("time", "throughput/", "memory/", "engine/", "sync/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.01)


def config_of(folder: Path, *overrides: str, name: str) -> RunConfig:
    return tiny.config(folder, *ranks.over(2), *overrides, name=name, trainer=STEADY)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunConfig:
    config = config_of(folder, name="undisturbed")
    with ranks.forked():
        runs.train(config)
    return config


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in read_metrics(config.run_dir / "metrics.jsonl")
    ]


def assert_equal(one: RunConfig, other: RunConfig) -> None:
    assert comparable(one) == comparable(other)
    assert runs.final_tensors(one) == runs.final_tensors(other)


def struck(
    number: signal.Signals,
    *,
    at_step: int,
    times: int = 1,
    method: str = "accumulate",
    is_known: bool = False,
) -> Callable[..., Any]:
    """The method of the trainer, before which rank 1 gets a signal at that step. If the end of the
    rank `is_known`, the ranks are asked only once it has been noticed."""
    plain = getattr(ShardedTrainer, method)
    left = times

    def struck_first(self: ShardedTrainer, *args: Any, **named: Any) -> Any:
        nonlocal left
        if named["step"] == at_step and left:
            left -= 1
            os.kill(ranks.forked_pids()[1], number)
            while is_known and self.group.health() is None:
                time.sleep(0.01)
        return plain(self, *args, **named)

    return struck_first


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_or_hangs_costs_a_restart_and_nothing_else(
    folder: Path, undisturbed: RunConfig, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ranks.descendants(os.getpid())
    # A rank that is killed is noticed at once: the deadline is for the one that is stopped.
    limit_s = 60 if number == signal.SIGKILL else 6
    config = config_of(folder, f"cluster.timeout_s={limit_s}", name=number.name)
    monkeypatch.setattr(ShardedTrainer, "accumulate", struck(number, at_step=4))
    with ranks.forked():
        result = runs.train(config)
    assert result.step == 5
    assert_equal(config, undisturbed)
    (event,) = runs.events(config, "trainer_restarted")
    assert (event["step"], event["from_step"], event["restarts"]) == (3, 2, 1)
    (remedy,) = runs.events(config, "remedy_applied")
    assert remedy["remedy"] == "restart_trainer"
    assert not runs.events(config, "run_failed")
    if number == signal.SIGKILL:
        assert "trainer rank 1 was ended by SIGKILL" in event["error"]
    else:
        assert "no answer from rank 0, 1 to 'accumulate' within 6 s" in event["error"]
        assert "rank 1 lags: its process is stopped by a signal" in event["error"]
        report = (config.run_dir / "hangs" / "trainer_1.txt").read_text()
        assert "rank 0: " in report
        assert "all-gather of" in report
        # Rank 0 waits for rank 1 in a collective, and its stack says where.
        assert "accumulate" in report.partition("== trainer rank 0")[2]
    assert ranks.all_gone(ranks.descendants(os.getpid()) - before)


@pytest.mark.slow
def test_ranks_that_die_at_the_same_step_again_and_again_end_the_run(
    folder: Path, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, "cluster.max_restarts=1", name="doomed")
    with ranks.forked(), monkeypatch.context() as patched:
        patched.setattr(
            ShardedTrainer, "apply", struck(signal.SIGKILL, at_step=4, times=2, method="apply")
        )
        with pytest.raises(WorkerError, match=r"restarted 1 times in a row(.|\n)*max_restarts"):
            runs.train(config)
    assert len(runs.events(config, "trainer_restarted")) == 1
    (failed,) = runs.events(config, "run_failed")
    assert failed["step"] == 3
    assert "rank 1" in failed["message"]
    assert "workers.log" in failed["message"]
    with ranks.forked():
        runs.train(config)
    assert_equal(config, undisturbed)


@pytest.mark.slow
def test_a_new_checkpoint_starts_the_count_again(
    folder: Path, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, "cluster.max_restarts=1", name="unlucky")
    monkeypatch.setattr(ShardedTrainer, "apply", struck(signal.SIGKILL, at_step=2, method="apply"))
    monkeypatch.setattr(ShardedTrainer, "accumulate", struck(signal.SIGKILL, at_step=4))
    with ranks.forked():
        runs.train(config)
    found = [(e["from_step"], e["restarts"]) for e in runs.events(config, "trainer_restarted")]
    assert found == [(0, 1), (2, 1)]
    assert_equal(config, undisturbed)


def test_nothing_is_sampled_twice_when_the_trainer_of_rl_is_restarted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("engine.own_process=true", "model.numerics=invariant", "trainer.max_steps=3")
    place = folder / "rl"
    place.mkdir()
    configs = [tiny_rl.config(place, f"name={name}", *common, *ranks.over(2)) for name in "ab"]
    with ranks.forked():
        runs.train(configs[0])
        # It dies between two calls.
        blow = struck(signal.SIGKILL, at_step=3, is_known=True)
        monkeypatch.setattr(ShardedTrainer, "accumulate", blow)
        runs.train(configs[1])
    assert len(runs.events(configs[1], "trainer_restarted")) == 1
    replayed = [r["rollout/replayed_rounds"] for r in comparable(configs[1])]
    assert replayed == [0, 0, 1], "step 3 was sampled before the trainer was lost"
    one, two = (comparable(config) for config in configs)
    for record in one + two:
        del record["rollout/replayed_rounds"]
    assert one == two
    assert runs.final_tensors(configs[0]) == runs.final_tensors(configs[1])


# A rank that meets the others, and is gone.
VANISHES = """
import os, sys
from pathlib import Path
from tests.support.fsdp_ranks import Place
place = Place(1, 2, Path(sys.argv[1]))
place.trainer(place.config("model", at={"init": "random"}))
os._exit(0)
"""


@pytest.fixture
def no_process_group() -> Iterator[None]:
    assert not torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_every_collective_without_the_other_ranks_says_that_they_are_lost(
    tmp_path: Path, no_process_group: None
) -> None:
    """Also outside of forward and backward passes: new ranks can resume after any of them."""
    tiny.recipe(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    other = forks.Forked(VANISHES, [str(tmp_path)], env=environment, imported=forks.SHARDS)
    place = Place(0, 2, tmp_path)
    trainer = place.trainer(place.config("model", at={"init": "random"}))
    assert other.wait() == 0
    for name, call in {
        "gather of a parameter": lambda: list(trainer.weights(Role.POLICY)),
        "gather of values": lambda: trainer.checksums(Role.POLICY),
        "broadcast of a value": lambda: trainer.ranks.of_first(1),
    }.items():
        with pytest.raises(LostRanksError, match=f"rank 0 lost the other ranks in '{name}'"):
            call()


def test_ranks_that_cannot_meet_say_that_they_are_lost(
    tmp_path: Path, no_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took the port meanwhile: the next start has another one."""
    tiny.recipe(tmp_path)
    config = Place(0, 2, tmp_path).config("model", at={"init": "random"}).for_trainer
    with socket.create_server((LOOPBACK, 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        context = WorkerContext(0, 2, 0, "trainer", LOOPBACK)
        with pytest.raises(
            LostRanksError, match=r"'meeting of 2 ranks'(.|\n)*address already in use"
        ):
            make_trainer(context, config=config, threads=1)
