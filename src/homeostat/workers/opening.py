"""Open a worker group: the one function that starts workers, for trainer, engines and helpers.

    open_group(config.cluster, GroupSpec(...)) -> WorkerGroup

The cluster says what launches workers of that kind and on which address they meet; the group is
driven in the same manner whatever that is. A new launcher is a name in `config.cluster.Launcher`,
an entry here, and a shape in tests/contract/test_worker_group_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from homeostat.config.cluster import AnyCluster, Launcher
from homeostat.workers.group import WorkerGroup
from homeostat.workers.in_process import open_in_process
from homeostat.workers.launchers import spawn, torchrun
from homeostat.workers.processes import open_processes
from homeostat.workers.spec import GroupSpec

Open = Callable[[AnyCluster, GroupSpec], WorkerGroup]

LAUNCHERS: dict[Launcher, Open] = {
    "in_process": open_in_process,
    "spawn": partial(open_processes, launch=spawn),
    "torchrun": partial(open_processes, launch=torchrun),
}


def open_group(cluster: AnyCluster, spec: GroupSpec) -> WorkerGroup:
    """Start the workers of a group and have each build its object."""
    return LAUNCHERS[cluster.launcher(spec.kind)](cluster, spec)
