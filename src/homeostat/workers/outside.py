"""Find out whether an outer torchrun or srun started this process as one rank of a run.

    torchrun --nnodes 2 --node-rank R ... -m homeostat train recipe.yaml     (on every node)
    srun --nodes 2 --ntasks-per-node 8 homeostat train recipe.yaml

Such a launcher starts the same command once per rank. Rank 0 becomes the controller, as if it had
been started alone; every process, rank 0's included, has a seat for one worker (seats.py).

Only variables that the launcher itself sets are read. A batch script or an interactive shell of
SLURM is one task, and counts as a plain start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from homeostat.config.cluster import AnyCluster, TorchrunCluster
from homeostat.config.mesh import Mesh
from homeostat.errors import ConfigError, Problem

# What a launcher sets for each process. It must not reach processes that we start: torch would
# look for the launcher's store in place of the one that they make.
VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
)
# Ports for runs that srun starts, below those that Linux gives to clients.
FIRST_PORT, NUM_PORTS = 15000, 17000
_HOST = re.compile(r"(?P<prefix>[^\[,]+)(\[(?P<number>\d+)[^\]]*\](?P<suffix>[^,\[]*))?")


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among those that a launcher started.

    `address` and `port` are where rank 0's store is; `has_store` if the launcher serves it. `name`
    distinguishes what several starts put into one store.
    """

    by: Literal["torchrun", "srun"]
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: int
    address: str
    port: int
    name: str
    has_store: bool

    def describe(self) -> str:
        """Return the number of processes as text for messages."""
        plural = "s" * (self.nodes > 1)
        each = f" on {self.nodes} node{plural}, {self.local_size} on each" if self.size > 1 else ""
        return f"{self.by} started {self.size} process{'es' * (self.size > 1)}{each}"


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that started this process; None if it was started alone."""
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        return _torchrun(environ)
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _srun(environ)
    return None


def forget_launch(environ: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables, which are about this process alone."""
    for name in VARIABLES:
        environ.pop(name, None)


def require_launch(launch: Launch | None, *, cluster: AnyCluster, mesh: Mesh) -> None:
    """Raise ConfigError, with the arithmetic, if a launch does not fit the recipe."""
    problem = _unlaunched(cluster) if launch is None else _misfit(launch, cluster, mesh)
    if problem is not None:
        raise ConfigError([problem])


def _unlaunched(cluster: AnyCluster) -> Problem | None:
    if not isinstance(cluster, TorchrunCluster) or cluster.nodes == 1:
        return None
    each = cluster.ranks_per_host
    return Problem(
        "cluster.nodes",
        f"{cluster.processes} ranks on {cluster.nodes} machines are started from outside, and this "
        "process was started alone.",
        f"Run `torchrun --nnodes {cluster.nodes} --nproc-per-node {each} --node-rank ... "
        f"--master-addr ... -m homeostat train ...` on each machine, or `srun --nodes "
        f"{cluster.nodes} --ntasks-per-node {each} homeostat train ...`, or set cluster.type=ray.",
    )


def _misfit(launch: Launch, cluster: AnyCluster, mesh: Mesh) -> Problem | None:
    found = launch.describe()
    if not isinstance(cluster, TorchrunCluster):
        if launch.size == 1:
            return None
        return Problem(
            "cluster.type",
            f"{found}, and {cluster.type} wants to be started once: all of them would do the same.",
            f"Set cluster={{type: torchrun, processes: {launch.size}, nodes: {launch.nodes}}} and "
            "trainer.backend.type=fsdp, or start one process.",
        )
    if launch.size != cluster.processes:
        return Problem(
            "cluster.processes",
            f"{found}, and the recipe has {mesh.arithmetic()} ranks.",
            f"Set it to {launch.size}, or start {cluster.processes} processes.",
        )
    if launch.nodes != cluster.nodes:
        return Problem(
            "cluster.nodes",
            f"{found}, and the recipe has {cluster.nodes} machine{'s' * (cluster.nodes > 1)}.",
            f"Set it to {launch.nodes}.",
        )
    if launch.local_size * launch.nodes != launch.size:
        return Problem(
            "cluster.processes",
            f"{found}, which are {launch.nodes} x {launch.local_size} = "
            f"{launch.nodes * launch.local_size} and not {launch.size}: nodes have unequal numbers "
            "of ranks.",
            "Start the same number of processes on every node.",
        )
    return None


def _torchrun(environ: Mapping[str, str]) -> Launch:
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        by="torchrun",
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_size=int(environ["LOCAL_WORLD_SIZE"]),
        nodes=int(environ["GROUP_WORLD_SIZE"]),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        name=f"{environ['TORCHELASTIC_RUN_ID']}/{attempt}",
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _srun(environ: Mapping[str, str]) -> Launch:
    size, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    on_nodes = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    port = environ.get("MASTER_PORT", FIRST_PORT + (7 * job + step) % NUM_PORTS)
    return Launch(
        by="srun",
        rank=int(environ["SLURM_PROCID"]),
        size=size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_size=on_nodes[int(environ["SLURM_NODEID"])],
        nodes=nodes,
        address=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        port=int(port),
        name=f"{job}.{step}/{environ.get('SLURM_RESTART_COUNT', '0')}",
        has_store=False,
    )


def first_host(names: str) -> str:
    """Return the first of SLURM's list of hosts, such as node[003-007,12]-ib,other1."""
    found = _HOST.match(names)
    assert found is not None, f"SLURM_STEP_NODELIST={names!r}"
    return "".join(part or "" for part in found.group("prefix", "number", "suffix"))


def _tasks_per_node(counts: str) -> list[int]:
    """Expand SLURM's list of counts, such as 2(x3),1."""
    found: list[int] = []
    for part in counts.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        found += [int(count)] * int(times or 1)
    return found
