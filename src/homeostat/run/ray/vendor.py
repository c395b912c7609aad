"""Import Ray, connect to it, and translate its errors into clear messages.

Ray is an extra (`homeostat[ray]`), so nothing imports it before a recipe asks for it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from homeostat.config.ray_cluster import RayCluster
from homeostat.errors import ConfigError, MissingDependencyError, Problem

# Nothing of ours is in Ray's object store, whose default is a third of the memory.
STORE_BYTES = 80 * 2**20
# Time limit for an address to accept a connection.
REACH_SECONDS = 10.0
# Variables of a Ray that is started here: no usage reports; its workers are not put behind every
# other process of the machine.
LOCAL_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
# Handlers that Ray replaces when it connects: a run has its own.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def import_ray() -> Any:
    """Return the package. Raises MissingDependencyError with the command that installs it."""
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingDependencyError.of(
            "ray", extra="ray", needed_for="cluster.type: ray"
        ) from error
    return ray


@contextmanager
def connected(cluster: RayCluster) -> Iterator[Any]:
    """Yield Ray, connected to the recipe's cluster. On exit its actors and its local Ray end."""
    ray = import_ray()
    with _own_handlers():
        _connect(ray, cluster)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, cluster: RayCluster) -> None:
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if cluster.address is None:
        for name, value in LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        settings |= {"address": "local", "include_dashboard": False}
        settings["object_store_memory"] = STORE_BYTES
    else:
        settings["address"] = cluster.address
    try:
        _require_listener(cluster.address)
        ray.init(**settings)
    except Exception as error:
        # Ray raises plain Exceptions, too: for example, where its processes do not start in time.
        if type(error) is Exception or isinstance(error, (OSError, RuntimeError, ValueError)):
            raise ConfigError([_no_ray(cluster.address, error)]) from error
        raise


def _require_listener(address: str | None) -> None:
    """Raise OSError or ValueError if nothing listens there: Ray would try for minutes."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise ValueError("an address is host:port, without a scheme")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS):
        pass


def _no_ray(address: str | None, error: Exception) -> Problem:
    why = str(error).rstrip(".")
    if address is None:
        return Problem(
            "cluster.address",
            f"Ray did not start on this machine: {why}.",
            "Is the machine busy? Run the command again later, or start Ray before it by "
            "`ray start --head`, and set the key to auto.",
        )
    return Problem(
        "cluster.address",
        f"no Ray cluster answers at {address}: {why}.",
        "Run `ray start --head` on one machine and `ray start --address=...` on the others. "
        "Remove the key to start a Ray cluster on this machine only.",
    )


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep the handlers of signals: Ray's end the process before a run has saved anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
