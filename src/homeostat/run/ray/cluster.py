"""Ray as a launcher of the worker groups that every run has.

    with ray_opened(config) as machines:  connect -> enough resources? -> proofs of every node
        open_group(cluster, spec):  seats (seats.py) -> child.py on each -> channels -> ProcessGroup
        machines.refit():  room for the run after a machine was lost (machines.py)

Nothing outlives the run. Actors are not detached, so that they end with the controller, even by
kill -9; a worker's process ends when its channel to the controller closes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

from homeostat.config.cluster import AnyCluster
from homeostat.config.ray_cluster import RayCluster
from homeostat.config.run import RunConfig
from homeostat.config.sync import AnyTransport
from homeostat.errors import ConfigError, WorkerDiedError, WorkerError
from homeostat.run.ray.machines import Machines
from homeostat.run.ray.nodes import own_node, require_nodes
from homeostat.run.ray.placement import Place, find_shortages, needs_of
from homeostat.run.ray.proofs import require_proofs
from homeostat.run.ray.seats import Deadline, Seat, own_seats, shared_seat
from homeostat.run.ray.supervise import ActorProcess
from homeostat.run.ray.transports import require_reachable
from homeostat.run.ray.vendor import connected
from homeostat.workers.channel import TcpListener
from homeostat.workers.child import Ticket
from homeostat.workers.keeper import Site
from homeostat.workers.launchers import end_launchers
from homeostat.workers.log import WorkerLog
from homeostat.workers.opening import launcher_opened
from homeostat.workers.processes import ProcessGroup, Started, open_started
from homeostat.workers.reception import Reception, kill_groups
from homeostat.workers.spec import GroupSpec

# How long processes have to end by themselves when a start has failed.
PATIENCE_SECONDS = 0.5


@contextmanager
def ray_opened(config: RunConfig, *, device: str) -> Iterator[Machines | None]:
    """Place workers with Ray for the duration of the block, if the recipe has a Ray cluster.

    Yields the machines, or None where there is no Ray. Raises ConfigError if the cluster can never
    hold the run, or a node lacks what the run needs.
    """
    cluster = config.cluster
    if not isinstance(cluster, RayCluster):
        yield None
        return
    settings = config.for_placement
    with connected(cluster) as ray:
        nodes = require_nodes(ray, cluster)
        if problems := find_shortages(settings, needs_of(settings, device=device), nodes):
            raise ConfigError(problems)
        require_proofs(ray, settings, nodes)
        machines = Machines(ray, config, device=device, nodes=nodes)
        launcher = RayLauncher(
            ray,
            engine_devices=config.engine.num_devices,
            transport=config.sync.transport,
            neighbours=config.mesh.sp,
            require_room=machines.require_room,
        )
        with launcher_opened("ray", launcher.open_group):
            yield machines


class RayLauncher:
    """Opens worker groups on a connected Ray. Remembers where trainer ranks are, for engines that
    share their devices, of which each spans `engine_devices`. So many `neighbours` among trainer
    ranks exchange much, and must be on one node. `require_room` raises if a node is gone without
    which the run does not fit."""

    def __init__(
        self,
        ray: Any,
        *,
        engine_devices: int = 1,
        transport: AnyTransport | None = None,
        neighbours: int = 1,
        require_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._ray = ray
        self._span = engine_devices
        self._transport = transport
        self._neighbours = neighbours
        self._require_room = require_room
        own = own_node(ray)
        self._address, self._node_id = own.address, own.node_id
        self._ranks: list[Place] = []
        self._shared: set[int] = set()
        self._lock = threading.Lock()

    def open_group(self, cluster: AnyCluster, spec: GroupSpec) -> ProcessGroup:
        """Start the workers of a group where there is room for them."""
        assert isinstance(cluster, RayCluster)
        return open_started(spec, partial(self._begin, cluster, spec))

    def _begin(self, cluster: RayCluster, spec: GroupSpec, log: WorkerLog) -> Started:
        deadline = Deadline(spec.start_timeout_s)
        processes: list[ActorProcess] = []
        with ExitStack() as undo:
            seats = self._seats(cluster, spec, deadline=deadline, undo=undo)
            undo.callback(end_launchers, processes, patience_s=PATIENCE_SECONDS)
            listener = TcpListener(self._address, backlog=2 * spec.size)
            kill = partial(self._kill, processes)
            with closing(Reception(listener, size=spec.size, log=log, kill=kill)) as reception:
                processes += self._launch(spec, seats, listener, log=log, deadline=deadline)
                links = reception.links(processes, timeout_s=deadline.left_s)
            # From here on the group ends its processes, and gives the seats back after that.
            release = undo.pop_all()
        return Started(
            links,
            processes,
            release=partial(_give_back, self._ray, release),
            describe_end=lambda index, code: processes[index].describe_end(),
            machines=[seat.place.address for seat in seats],
        )

    def _seats(
        self, cluster: RayCluster, spec: GroupSpec, *, deadline: Deadline, undo: ExitStack
    ) -> list[Seat]:
        self._require_room()
        if spec.kind == "engine" and cluster.placement == "colocated" and self._ranks:
            seats = [self._beside_ranks(spec, deadline=deadline, undo=undo)]
        else:
            seats = own_seats(
                self._ray,
                spec,
                cpus=cluster.cpus_per_worker,
                neighbours=self._neighbours if spec.kind == "trainer" else 1,
                deadline=deadline,
                undo=undo,
                while_waiting=self._require_room,
            )
        if spec.kind == "trainer":
            self._ranks = [seat.place for seat in seats]
        elif self._ranks:
            require_reachable(self._transport, self._ranks, seats[0].place)
        return seats

    def _beside_ranks(self, spec: GroupSpec, *, deadline: Deadline, undo: ExitStack) -> Seat:
        assert spec.size == 1, f"{spec.name}: an engine is one worker, not {spec.size}"
        span = self._span
        with self._lock:
            free = set(range(len(self._ranks) // span)) - self._shared
            if not free:
                raise WorkerError(
                    f"{spec.name}: all {len(self._ranks)} trainer ranks already share their "
                    "devices with other engines (cluster.placement=colocated)."
                )
            slot = min(free)
            self._shared.add(slot)
        undo.callback(self._shared.discard, slot)
        ranks = self._ranks[slot * span : (slot + 1) * span]
        return shared_seat(self._ray, spec, ranks, deadline=deadline, undo=undo)

    def _launch(
        self,
        spec: GroupSpec,
        seats: list[Seat],
        listener: TcpListener,
        *,
        log: WorkerLog,
        deadline: Deadline,
    ) -> list[ActorProcess]:
        site = Site.of_this_process()
        variables = self._variables(spec, seats, deadline=deadline)
        asked = []
        for rank, seat in enumerate(seats):
            ticket = Ticket(
                address=listener.address,
                key=listener.key.hex(),
                group_name=spec.name,
                size=spec.size,
                host=seat.place.address,
                log_file=str(log.file),
                rank=rank,
                local_rank=_local_rank(seats, rank),
                sends_log=True,
            )
            asked.append(seat.actor.launch.remote(ticket, variables[rank], site))
        self._answers(spec, asked, deadline=deadline)
        return [
            ActorProcess(seat.actor, seat.place, rank=rank, log=log)
            for rank, seat in enumerate(seats)
        ]

    def _variables(
        self, spec: GroupSpec, seats: list[Seat], *, deadline: Deadline
    ) -> list[dict[str, str]]:
        """Return the environment that each rank has beyond its node's."""
        meeting: dict[str, str] = {}
        if spec.kind == "trainer" or spec.size > 1:
            first = seats[0].place.address
            asked = [seats[0].actor.free_port.remote(first)]
            (port,) = self._answers(spec, asked, deadline=deadline)
            meeting = {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
        found = []
        for rank, seat in enumerate(seats):
            mine = dict(spec.env)
            if seat.gpus:
                mine["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
            if meeting:
                beside = [one for one in seats if one.place.node_id == seat.place.node_id]
                mine |= {"RANK": str(rank), "WORLD_SIZE": str(spec.size), **meeting}
                mine |= {"LOCAL_RANK": str(_local_rank(seats, rank))}
                mine |= {"LOCAL_WORLD_SIZE": str(len(beside))}
            found.append(mine)
        return found

    def _answers(self, spec: GroupSpec, asked: list[Any], *, deadline: Deadline) -> list[Any]:
        try:
            return self._ray.get(asked, timeout=deadline.left_s)
        except self._ray.exceptions.GetTimeoutError:
            raise WorkerError(
                f"{spec.name}: its Ray actors did not start their processes within "
                f"{deadline.seconds:.4g} s."
            ) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(
                f"{spec.name}: a Ray actor died as it started: {error}"
            ) from error

    def _kill(self, processes: list[ActorProcess], rank: int, pids: tuple[int, int]) -> None:
        """Kill processes that their guardian can no longer end, on whatever node they run."""
        process = processes[rank]
        if process.place.node_id == self._node_id:
            kill_groups(pids)
        elif not process.keeper_is_gone:
            process.actor.kill_groups.remote(pids)
        else:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            here = strategy(node_id=process.place.node_id, soft=False)
            kill = self._ray.remote(kill_groups).options(num_cpus=0, scheduling_strategy=here)
            kill.remote(pids)


def _local_rank(seats: list[Seat], rank: int) -> int:
    """Count the ranks of the same node that come before."""
    return sum(one.place.node_id == seats[rank].place.node_id for one in seats[:rank])


def _give_back(ray: Any, seats: ExitStack) -> None:
    """End actors and placement group. Idempotent, and of no use once Ray is gone."""
    with suppress(ray.exceptions.RayError, ConnectionError):
        seats.close()
