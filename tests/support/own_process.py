"""One worker process for many engines: real calls to a real process, without a start for each."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from homeostat.config.cluster import AnyCluster, InProcessCluster
from homeostat.errors import WorkerError
from homeostat.rollout.native.host import build_engine
from homeostat.rollout.registry import ENGINES
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.server import SERVER, EngineServer
from homeostat.run.wiring import engines
from homeostat.workers.context import WorkerContext
from homeostat.workers.group import Pending, WorkerGroup
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

TIMEOUT_S = 60.0


def make_workshop(context: WorkerContext) -> Workshop:
    return Workshop(context)


class Workshop:
    """In the worker: serves the engine that was built last."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._server: EngineServer | None = None

    def rebuild(self, kwargs: dict[str, Any]) -> None:
        self._server = EngineServer(build_engine(self._context, **kwargs))

    def drop(self) -> None:
        assert self._server is not None, "rebuild comes first"
        self._server.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class Lease:
    """The process as the group of one engine: to close it closes the engine."""

    name = "engine"
    size = 1

    def __init__(self, group: WorkerGroup, *, on_end: Callable[[], None]) -> None:
        self._group = group
        self._on_end = on_end
        self._is_closed = False

    def call(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Pending[Any]:
        if self._is_closed:
            raise WorkerError(f"engine: the group is closed, {method!r} cannot be called.")
        return self._group.call(rank, method, *args, **kwargs)

    def health(self) -> str | None:
        return self._group.health()

    def report_hang(self) -> str:
        return self._group.report_hang()

    def abandon(self) -> None:
        """End the process itself: the next engine gets another."""
        self._is_closed = True
        self._group.abandon()
        self._on_end()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._group.call(0, "drop").result(timeout_s=TIMEOUT_S)


class OwnProcess:
    """Builds engines in one process, which is started when it is first needed."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None
        self._folder: TemporaryDirectory[str] | None = None

    def engine(self, kwargs: dict[str, Any], *, vocabulary: int) -> RemoteEngine:
        """`kwargs` are those of `build_engine`."""
        return RemoteEngine(
            lambda: self.lease(kwargs),
            vocabulary=vocabulary,
            can_decode=True,
            timeout_s=TIMEOUT_S,
            update_timeout_s=TIMEOUT_S,
        )

    def lease(self, kwargs: dict[str, Any]) -> Any:
        """The process, as the group of an engine that is built now."""
        if self._group is None:
            self._folder = TemporaryDirectory(prefix="own-process-")
            spec = GroupSpec(
                factory="tests.support.own_process:make_workshop",
                kind="engine",
                name="engine",
                log_file=Path(self._folder.name) / "engine.log",
            )
            self._group = open_group(InProcessCluster(), spec)
        self._group.call(0, "rebuild", kwargs).result(timeout_s=TIMEOUT_S)
        return Lease(self._group, on_end=self.close)

    def close(self) -> None:
        if self._group is not None:
            with suppress(WorkerError):
                self._group.close()
            self._group = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


SHARED = OwnProcess()
atexit.register(SHARED.close)


@contextmanager
def shared_engine_process() -> Iterator[None]:
    """Runs whose native engine has its own process share one, which is started once: a start takes
    seconds. Not for tests of the start, or ones that kill the process."""

    def open_shared(cluster: AnyCluster, spec: GroupSpec) -> Any:
        assert (spec.factory, spec.kwargs["factory"]) == (SERVER, ENGINES["native"].factory)
        return SHARED.lease(spec.kwargs["kwargs"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "open_group", open_shared)
        yield
