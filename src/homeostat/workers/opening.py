"""Open a worker group: the one function that starts workers, for trainer, engines and helpers.

    open_group(config.cluster, GroupSpec(...)) -> WorkerGroup

The cluster settings decide which launcher starts workers of that kind and at which address they
meet. The group is used in the same manner with every launcher. A new launcher is a name in
`config.ranks.Launcher`, an entry here, and a shape in tests/contract/test_worker_group_contract.py.
A launcher that holds connections, as Ray's does, is registered only while these are open
(`launcher_opened`). If torchrun or srun started this process, its ranks are used instead of
starting torchrun again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    name = cluster.launcher(spec.kind)
    if name == "torchrun" and "outside" in LAUNCHERS:
        name = "outside"
    assert name in LAUNCHERS, f"{spec.name}: nobody has opened the launcher {name!r}"
    return LAUNCHERS[name](cluster, replace(spec, env={**cluster.env, **spec.env}))


@contextmanager
def launcher_opened(name: Launcher, open_with: Open) -> Iterator[None]:
    """Have `open_group` use a launcher for the duration of the block."""
    assert name not in LAUNCHERS, f"the launcher {name!r} is open already"
    LAUNCHERS[name] = open_with
    try:
        yield
    finally:
        del LAUNCHERS[name]
