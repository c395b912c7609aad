"""Runs that an outer torchrun or srun starts once per rank: two simulated nodes on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from tests.support import ranks, runs, tiny

from homeostat.config import RunConfig
from homeostat.config.ranks import LOOPBACK
from homeostat.workers.network import free_port

STEPS = 6
STEADY = {"max_steps": STEPS, "schedule": {"type": "constant", "warmup_steps": 0}}
TWO_NODES = "cluster={type: torchrun, processes: 2, nodes: 2, timeout_s: 120}"
FSDP = "trainer.backend={type: fsdp}"
TRAIN = ("-m", "homeostat", "train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def by_ourselves(folder: Path) -> RunConfig:
    """The same run, whose ranks the controller starts itself."""
    config = tiny.config(folder, *ranks.over(2), name="ours", trainer=STEADY)
    with ranks.forked():
        runs.train(config)
    return config


def start(
    folder: Path, name: str, before: Sequence[str], env: Mapping[str, str], *changes: str
) -> tuple[RunConfig, subprocess.Popen[str]]:
    """Start the command of one rank, or of one node's torchrun."""
    raw = tiny.recipe(folder, name=name, trainer=STEADY)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(raw))
    process = subprocess.Popen(
        [sys.executable, *before, *TRAIN, str(recipe), TWO_NODES, FSDP, *changes],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return tiny.config(folder, TWO_NODES, FSDP, *changes, name=name, trainer=STEADY), process


def by_srun(rank: int, port: int) -> dict[str, str]:
    """The variables that srun gives one of two tasks, on a node of its own."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,elsewhere",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "MASTER_PORT": str(port),
    }


def end(processes: Sequence[subprocess.Popen[str]], *, timeout_s: float = 150) -> list[str]:
    """Wait for processes, and return what they wrote. None is left behind."""
    try:
        return [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.ranks
def test_two_agents_of_torchrun_are_one_run(folder: Path, by_ourselves: RunConfig) -> None:
    before = ranks.descendants(os.getpid())
    torchrun = (
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--master-addr", LOOPBACK, "--master-port", str(free_port(LOOPBACK))),
    )
    agents = [
        start(
            folder,
            "agents",
            (*torchrun, "--node-rank", str(node), "--no-python", sys.executable),
            {},
        )
        for node in (1, 0)
    ]
    (config, other), (_, first) = agents
    words = end([other, first])
    assert [other.returncode, first.returncode] == [0, 0], words
    assert "torchrun started 2 processes on 2 nodes, 1 on each; this one, rank 0, is" in words[1]
    assert words[0].strip() == "", "ranks above 0 have nothing to say"
    assert runs.losses(config) == runs.losses(by_ourselves)
    assert runs.final_tensors(config) == runs.final_tensors(by_ourselves)
    assert ranks.all_gone(ranks.descendants(os.getpid()) - before)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_tasks_of_srun_survive_the_death_of_a_worker(
    folder: Path, by_ourselves: RunConfig
) -> None:
    """The seats start other workers; srun is not asked."""
    before, port = ranks.descendants(os.getpid()), free_port(LOOPBACK)
    saved = "checkpoint={interval_steps: 1}"
    tasks = [start(folder, "tasks", (), by_srun(rank, port), saved) for rank in (0, 1)]
    (config, first), (_, other) = tasks
    until = time.monotonic() + 120
    while not (config.run_dir / "checkpoints/step_00000002").exists():
        assert time.monotonic() < until
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    (worker,) = ranks.rank_pids(other.pid).values()
    os.kill(worker, signal.SIGKILL)
    words = end([first, other])
    assert [first.returncode, other.returncode] == [0, 0], words
    assert len(runs.events(config, "trainer_restarted")) == 1
    assert runs.losses(config) == runs.losses(by_ourselves)
    assert ranks.all_gone(ranks.descendants(os.getpid()) - before)


@pytest.mark.slow
@pytest.mark.ranks
def test_tasks_end_with_the_controller(folder: Path) -> None:
    before, port = ranks.descendants(os.getpid()), free_port(LOOPBACK)
    long = "trainer.max_steps=100000"
    tasks = [start(folder, "killed", (), by_srun(rank, port), long) for rank in (0, 1)]
    (config, first), (_, other) = tasks
    until = time.monotonic() + 120
    metrics = config.run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.05)
    first.kill()
    words = end([first, other], timeout_s=30)
    assert other.returncode == 1
    assert "the controller, rank 0 at localhost, is gone" in words[1]
    assert ranks.all_gone(ranks.descendants(os.getpid()) - before)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_launch_of_another_size_is_refused_by_all(folder: Path) -> None:
    port = free_port(LOOPBACK)
    env = [{**by_srun(rank, port), "SLURM_STEP_NUM_TASKS": "4"} for rank in (0, 1)]
    tasks = [start(folder, "refused", (), one)[1] for one in env]
    words = end(tasks, timeout_s=60)
    assert [task.returncode for task in tasks] == [2, 2]
    assert "replicate 1 x shard 2 x cp 1 x sp 1 = 2 ranks. Set it to 4" in words[0]
