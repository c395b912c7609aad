"""Give the workers of a group their actors: each on a node that has what the worker needs.

    own       a placement group of the workers alone; ranks of one node are neighbours
    shared    an engine on the node, and with the GPUs, of trainer ranks (colocated)

Every wait ends, and names what it waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from homeostat.errors import WorkerDiedError, WorkerError
from homeostat.run.ray.nodes import alive_nodes
from homeostat.run.ray.placement import Place
from homeostat.workers.keeper import Keeper
from homeostat.workers.spec import GroupSpec

# Calls of an actor that are answered at one time: `watch` is one of them from start to end.
NUM_THREADS = 4
# How often somebody looks up while Ray places a group.
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Seat:
    """An actor, and where it is. `gpus` are those that its worker sees; None: as Ray set them."""

    actor: Any
    place: Place
    gpus: tuple[str, ...] | None = None


class Deadline:
    """The time by which a group must have started."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.01, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


class KeeperActor(Keeper):
    """A Keeper that knows from Ray where it is."""

    def place(self) -> tuple[str, tuple[str, ...]]:
        """Return the id of its node, and its GPUs."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ()))


def own_seats(
    ray: Any,
    spec: GroupSpec,
    *,
    cpus: float,
    neighbours: int,
    deadline: Deadline,
    undo: ExitStack,
    while_waiting: Callable[[], None],
) -> list[Seat]:
    """Reserve what the workers need: one bundle for `neighbours` of them, which share a node.

    `undo` gives them back. `while_waiting` is called now and then, and raises to end the wait."""
    assert spec.size % neighbours == 0, (spec.name, spec.size, neighbours)
    each = {"CPU": cpus, **({"GPU": float(spec.num_gpus)} if spec.num_gpus else {})}
    bundle = {name: neighbours * amount for name, amount in each.items()}
    group = ray.util.placement_group([bundle] * (spec.size // neighbours), strategy="PACK")
    undo.callback(ray.util.remove_placement_group, group)
    while not group.wait(min(LOOK_SECONDS, deadline.left_s)):
        while_waiting()
        if not deadline.is_over:
            continue
        free = ray.available_resources()
        raise WorkerError(
            f"{spec.name}: Ray did not place {spec.size // neighbours} x {_text(bundle)} within "
            f"{deadline.seconds:.4g} s. Free in the whole cluster: {_text(free)}. Another job may "
            "hold the rest (`ray status` shows it), or no single machine has room for one worker."
        )
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actors = [
        _actor(ray, strategy(group, placement_group_bundle_index=index // neighbours), each)
        for index in range(spec.size)
    ]
    for actor in actors:
        undo.callback(ray.kill, actor)
    places = _places(ray, actors, spec, deadline=deadline)
    return [Seat(actors[index], places[index]) for index in by_node(places)]


def shared_seat(
    ray: Any, spec: GroupSpec, ranks: Sequence[Place], *, deadline: Deadline, undo: ExitStack
) -> Seat:
    """Seat an engine beside trainer ranks of one node, whose GPUs it uses without reserving any."""
    node_ids = {place.node_id for place in ranks}
    if len(node_ids) > 1:
        raise WorkerError(
            f"{spec.name}: it spans {len(ranks)} devices, and the trainer ranks whose devices it "
            f"would share are on {', '.join(sorted({place.address for place in ranks}))}. Set "
            "engine.tensor_parallel_size to a divisor of the ranks of a machine, or "
            "cluster.placement=disaggregated."
        )
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    actor = _actor(ray, strategy(node_id=node_ids.pop(), soft=False), {"CPU": 0.0})
    undo.callback(ray.kill, actor)
    (place,) = _places(ray, [actor], spec, deadline=deadline)
    gpus = tuple(gpu for rank in ranks for gpu in rank.gpus)
    return Seat(actor, place, gpus)


def by_node(places: Sequence[Place]) -> list[int]:
    """Return the indices of places grouped by node, nodes in order of first appearance."""
    nodes = list(dict.fromkeys(place.node_id for place in places))
    return sorted(range(len(places)), key=lambda index: (nodes.index(places[index].node_id), index))


def _actor(ray: Any, strategy: Any, bundle: dict[str, float]) -> Any:
    return (
        ray.remote(KeeperActor)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_concurrency=NUM_THREADS,
            max_restarts=0,
        )
        .remote()
    )


def _places(ray: Any, actors: Sequence[Any], spec: GroupSpec, *, deadline: Deadline) -> list[Place]:
    asked = [actor.place.remote() for actor in actors]
    try:
        found = ray.get(asked, timeout=deadline.left_s)
    except ray.exceptions.GetTimeoutError:
        _, late = ray.wait(asked, num_returns=len(asked), timeout=0)
        ranks = ", ".join(str(asked.index(one)) for one in late)
        raise WorkerError(
            f"{spec.name}: Ray did not start the actor of rank {ranks} within "
            f"{deadline.seconds:.4g} s."
        ) from None
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(f"{spec.name}: a Ray actor died as it started: {error}") from error
    addresses = {node.node_id: node.address for node in alive_nodes(ray)}
    lost = [str(rank) for rank, (node_id, _) in enumerate(found) if node_id not in addresses]
    if lost:
        raise WorkerDiedError(
            f"{spec.name}: the machine of rank {', '.join(lost)} left the Ray cluster as the "
            "actor started there."
        )
    return [Place(node_id, addresses[node_id], gpus) for node_id, gpus in found]


def _text(resources: dict[str, float]) -> str:
    shown = {name: value for name, value in sorted(resources.items()) if name in ("CPU", "GPU")}
    return ", ".join(f"{value:g} {name}" for name, value in shown.items()) or "nothing"
