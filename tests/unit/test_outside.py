"""The variables by which a process knows that an outer torchrun or srun started it as a rank."""

from __future__ import annotations

from typing import Any

import pytest

from homeostat.config.cluster import AnyCluster, FsdpBackend, InProcessCluster, TorchrunCluster
from homeostat.config.loading.load import build_config
from homeostat.config.mesh import Mesh
from homeostat.config.ray_cluster import RayCluster
from homeostat.errors import ConfigError
from homeostat.workers.network import own_address
from homeostat.workers.outside import find_launch, first_host, forget_launch, require_launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "PATH": "/bin",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[007-008],gpu3",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_torchrun_is_known_by_its_variables() -> None:
    launch = find_launch(TORCHRUN)
    assert launch is not None
    assert (launch.by, launch.rank, launch.size) == ("torchrun", 3, 4)
    assert (launch.local_rank, launch.local_size, launch.nodes) == (1, 2, 2)
    assert (launch.address, launch.port, launch.has_store) == ("10.0.0.1", 29500, True)
    # A second attempt must not find where the first one's controller was.
    again = find_launch({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None
    assert again.name != launch.name


def test_srun_is_known_by_the_variables_of_a_step() -> None:
    launch = find_launch(SRUN)
    assert launch is not None
    assert (launch.by, launch.rank, launch.size) == ("srun", 3, 5)
    assert (launch.local_rank, launch.local_size, launch.nodes) == (1, 2, 3)
    assert (launch.address, launch.has_store) == ("node007", False)
    assert 1024 < launch.port < 32768
    other = find_launch({**SRUN, "SLURM_STEP_ID": "3"})
    assert other is not None
    assert other.port != launch.port
    named = find_launch({**SRUN, "MASTER_ADDR": "ib0", "MASTER_PORT": "77"})
    assert named is not None
    assert (named.address, named.port) == ("ib0", 77)


def test_torchrun_inside_of_a_step_of_slurm_is_the_launcher() -> None:
    launch = find_launch({**SRUN, **TORCHRUN})
    assert launch is not None
    assert launch.by == "torchrun"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script, which is one task of a job that has more.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # A shell: srun --pty bash.
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # Variables that somebody exported.
        {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4"},
    ],
)
def test_a_plain_start_is_none_of_them(environ: dict[str, str]) -> None:
    assert find_launch(environ) is None


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3,5]", "node3"),
        ("gpu[0012-0020]-ib,login", "gpu0012-ib"),
        ("a-b.c[7-9].d", "a-b.c7.d"),
    ],
)
def test_the_first_host_of_a_list(names: str, first: str) -> None:
    assert first_host(names) == first


def test_what_is_about_this_process_alone_is_removed() -> None:
    environ = dict(TORCHRUN)
    forget_launch(environ)
    assert environ == {"PATH": "/bin"}


def torchrun(processes: int, nodes: int = 1) -> TorchrunCluster:
    return TorchrunCluster(type="torchrun", processes=processes, nodes=nodes)


@pytest.mark.parametrize(
    ("environ", "cluster", "message"),
    [
        (
            TORCHRUN,
            torchrun(2),
            r"cluster.processes: torchrun started 4 processes on 2 nodes, 2 on each, and the "
            r"recipe has replicate 1 x shard 1 x cp 2 x sp 1 = 2 ranks. Set it to 4, or start 2",
        ),
        (TORCHRUN, torchrun(4), r"cluster.nodes: .* recipe has 1 machine. Set it to 2"),
        (TORCHRUN, InProcessCluster(), r"cluster.type: .*in_process wants to be started once"),
        (TORCHRUN, RayCluster(type="ray"), r"ray wants to be started once.*\n?.*nodes: 2"),
        (SRUN, torchrun(5, 3), r"3 x 2 = 6 and not 5: nodes have unequal numbers"),
        ({}, torchrun(4, 2), r"cluster.nodes: 4 ranks on 2 machines are started from outside.* "
                             r"--nnodes 2 --nproc-per-node 2"),
    ],
)  # fmt: skip
def test_a_launch_that_does_not_fit_is_refused_with_the_arithmetic(
    environ: dict[str, str], cluster: AnyCluster, message: str
) -> None:
    mesh = FsdpBackend(type="fsdp", context_parallel_size=2).mesh(2)
    with pytest.raises(ConfigError, match=message):
        require_launch(find_launch(environ), cluster=cluster, mesh=mesh)


@pytest.mark.parametrize(
    ("environ", "cluster"),
    [
        (TORCHRUN, torchrun(4, 2)),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, InProcessCluster()),
        ({}, torchrun(4)),
    ],
)
def test_a_launch_that_fits(environ: dict[str, str], cluster: AnyCluster) -> None:
    require_launch(find_launch(environ), cluster=cluster, mesh=Mesh(shard=cluster.processes))


def build(*overrides: str) -> Any:
    raw = {
        "name": "run",
        "runs_dir": "runs",
        "algorithm": {"type": "sft"},
        "model": {"path": "m"},
        "cluster": {"type": "torchrun", "processes": 4, "nodes": 2},
        "trainer": {"backend": {"type": "fsdp"}},
        "data": {"train": [{"type": "messages", "path": "p.jsonl"}]},
    }
    return build_config(raw, list(overrides), file=None)


def test_nodes_say_how_many_ranks_a_machine_has() -> None:
    assert build().cluster.ranks_per_host == 2
    with pytest.raises(ConfigError, match=r"4 = 1 x 3 \+ 1"):
        build("cluster.nodes=3")
    with pytest.raises(ConfigError, match="4 ranks that exchange heads must be on one machine"):
        build("trainer.backend.sequence_parallel_size=4")


def test_the_own_address_is_one_that_others_reach() -> None:
    assert own_address("127.0.0.3") == "127.0.0.3"
    assert own_address("localhost") in ("127.0.0.1", "::1")
