"""The machines that a run is placed on, and what happens to the run when one of them is lost.

    placing a group   -> no room on the machines that are left -> NodeLostError
    running (start.py)-> resume from the last checkpoint -> refit: wait, or fewer ranks and engines

cluster.on_lost_node chooses between the two. Ray reports which machines are alive, but may need
half a minute to notice that one is gone; therefore room is checked again while a group waits to be
placed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from homeostat.config.ray_cluster import RayCluster
from homeostat.config.run import RunConfig
from homeostat.errors import NodeLostError, WorkerError
from homeostat.run.ray.nodes import alive_nodes
from homeostat.run.ray.placement import Node
from homeostat.run.ray.proofs import require_proofs
from homeostat.run.ray.room import describe_missing, has_room, shrunk

LOOK_SECONDS = 0.5
# How often the log says that the run is still waiting.
SECONDS_BETWEEN_LINES = 60.0

log = logging.getLogger(__name__)


class Emit(Protocol):
    """Records an event of the run."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


class Machines:
    """The nodes of a connected Ray as this run knows them. `now` is the recipe as it runs now."""

    def __init__(self, ray: Any, config: RunConfig, *, device: str, nodes: Sequence[Node]) -> None:
        self.now = config
        self._recipe = config
        self._ray = ray
        self._device = device
        self._known = {node.node_id: node for node in nodes}

    def require_room(self) -> None:
        """Raise NodeLostError if a machine is gone, and the others do not hold the run."""
        nodes = alive_nodes(self._ray)
        if self._lost(nodes) and not self._holds(self.now, nodes):
            raise NodeLostError(self._describe(self.now, nodes))

    def refit(self, emit: Emit) -> RunConfig:
        """Return the recipe of a size that the machines hold, after a wait if there is no other.

        Raises WorkerError if the wait lasts longer than cluster.node_timeout_s, and ConfigError if
        a machine that came instead lacks what the run needs.
        """
        began = time.monotonic()
        nodes = alive_nodes(self._ray)
        found = self._fitting(nodes)
        waited_s = 0.0
        if found is None or _is_smaller(found, self.now):
            self._tell_lost(nodes, emit, waits=found is None)
        if found is None:
            found, nodes = self._waited(began)
            waited_s = time.monotonic() - began
        self._prove_new(nodes)
        self._tell(found, emit, waited_s=waited_s)
        self.now = found
        self._known = {node.node_id: node for node in nodes}
        return found

    @property
    def _cluster(self) -> RayCluster:
        cluster = self._recipe.cluster
        assert isinstance(cluster, RayCluster), cluster
        return cluster

    def _lost(self, nodes: Sequence[Node]) -> list[Node]:
        alive = {node.node_id for node in nodes}
        return [node for node_id, node in self._known.items() if node_id not in alive]

    def _holds(self, config: RunConfig, nodes: Sequence[Node]) -> bool:
        return has_room(config.for_placement, nodes, device=self._device)

    def _fitting(self, nodes: Sequence[Node]) -> RunConfig | None:
        """Return the whole run, or the largest smaller one if the recipe allows it."""
        is_complete = self.now is self._recipe and not self._lost(nodes)
        if is_complete or self._holds(self._recipe, nodes):
            return self._recipe
        if self._cluster.on_lost_node == "wait":
            return None
        return shrunk(self._recipe, nodes, device=self._device)

    def _describe(self, config: RunConfig, nodes: Sequence[Node]) -> str:
        gone = ", ".join(map(_named, self._lost(nodes)))
        missing = describe_missing(config.for_placement, nodes, device=self._device)
        there = ", ".join(node.address for node in nodes)
        return f"{gone or 'a machine'} left the Ray cluster, which has {there} now. {missing}."

    def _waited(self, began: float) -> tuple[RunConfig, list[Node]]:
        limit_s = self._cluster.node_timeout_s
        next_line = began + SECONDS_BETWEEN_LINES
        while True:
            nodes = alive_nodes(self._ray)
            if (found := self._fitting(nodes)) is not None:
                return found, nodes
            now = time.monotonic()
            if now - began > limit_s:
                raise WorkerError(
                    f"{self._describe(self._recipe, nodes)} No machine came within {limit_s:.4g} s "
                    "(cluster.node_timeout_s). Nothing saved is lost: run the same command to "
                    "resume, with as many ranks as there is room for (cluster.processes)."
                )
            if now > next_line:
                next_line = now + SECONDS_BETWEEN_LINES
                text = "still waiting for machines, for %.0f s at most: %s"
                log.warning(text, limit_s - (now - began), self._describe(self._recipe, nodes))
            time.sleep(LOOK_SECONDS)

    def _prove_new(self, nodes: Sequence[Node]) -> None:
        """Have machines that were not there before show that they can take part."""
        new = [node for node in nodes if node.node_id not in self._known]
        if new:
            require_proofs(self._ray, self._recipe.for_placement, new)

    def _tell_lost(self, nodes: Sequence[Node], emit: Emit, *, waits: bool) -> None:
        described = self._describe(self._recipe, nodes)
        until = ""
        if waits:
            seconds = self._cluster.node_timeout_s
            until = datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%F %T UTC")
            text = "%s Waiting for it, or for another machine, until %s (cluster.node_timeout_s)."
            log.warning(text, described, until)
        else:
            log.warning("%s", described)
        emit(
            "node_lost",
            nodes=[node.address for node in self._lost(nodes)],
            missing=describe_missing(self._recipe.for_placement, nodes, device=self._device),
            action="wait" if waits else "shrink",
            until=until,
        )

    def _tell(self, found: RunConfig, emit: Emit, *, waited_s: float) -> None:
        before, now = _sizes(self.now), _sizes(found)
        if _is_smaller(found, self.now):
            log.warning(
                "The run shrinks from %s to %s (cluster.on_lost_node=shrink). Gradients are still "
                "those of the whole batch: every rank computes more of it.",
                _sized(before),
                _sized(now),
            )
            facts = {"ranks_before": before[0], "ranks_now": now[0]}
            facts |= {"engines_before": before[1], "engines_now": now[1]}
            emit("cluster_shrunk", **facts)
        elif waited_s or now != before:
            log.info("there is room for %s again", _sized(now))
            emit("cluster_restored", ranks=now[0], engines=now[1], waited_s=waited_s)


def _is_smaller(one: RunConfig, other: RunConfig) -> bool:
    return any(a < b for a, b in zip(_sizes(one), _sizes(other), strict=True))


def _sizes(config: RunConfig) -> tuple[int, int]:
    return config.cluster.processes, config.num_engines


def _sized(sizes: tuple[int, int]) -> str:
    ranks, engines = sizes
    text = f"{ranks} rank{'s' * (ranks != 1)}"
    return text + (f" and {engines} engine{'s' * (engines != 1)}" if engines else "")


def _named(node: Node) -> str:
    has = [f"{node.resources[one]:g} {one}" for one in ("GPU", "CPU") if node.resources.get(one)]
    return f"{node.address} ({', '.join(has)})"
