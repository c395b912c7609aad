"""One process that serves one vLLM after another, and reports the settings that vLLM received.

To import vLLM takes longer than to start it. `open` stands in for `open_group` where a run
starts its engine: real calls to a real process, without an import for each run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.support.own_process import Lease

from homeostat.config.cluster import AnyCluster
from homeostat.errors import WorkerError
from homeostat.rollout.server import SERVER, EngineServer, serve_engine
from homeostat.run.wiring import engines
from homeostat.workers.context import WorkerContext
from homeostat.workers.group import WorkerGroup
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

TIMEOUT_S = 240.0


def make_host(context: WorkerContext) -> Host:
    return Host(context)


class Host:
    """In the worker: serves the engine that was built last."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._server: EngineServer | None = None

    def rebuild(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns vLLM's own settings, as it took them."""
        self._server = serve_engine(self._context, **kwargs)
        return _settings(self._server.engine)

    def drop(self) -> None:
        assert self._server is not None, "rebuild comes first"
        self._server.close()
        # A vLLM that is collected takes down what all of a process share: now, not under the next.
        self._server = None
        gc.collect()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


def _settings(engine: Any) -> dict[str, Any]:
    config = engine.core._llm.vllm_config
    return {
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "cache_bytes": config.cache_config.kv_cache_memory_bytes,
        "block_size": config.cache_config.block_size,
        "dtype": str(config.model_config.dtype),
        "enforce_eager": config.model_config.enforce_eager,
        "ranks": len(engine.core.call("homeostat_cache_bytes")),
    }


class Seat(Lease):
    """The process as the group of one engine; it may have been killed meanwhile."""

    def close(self) -> None:
        with suppress(WorkerError):
            super().close()


class VllmHost:
    """The process, which starts when it is first needed, and the settings of the last vLLM."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self._group: WorkerGroup | None = None
        self._folder = TemporaryDirectory(prefix="vllm-host-")

    def open(self, cluster: AnyCluster, spec: GroupSpec) -> Seat:
        assert spec.factory == SERVER, spec.factory
        if self._group is not None and self._group.health() is not None:
            self._end()
        if self._group is None:
            log_file = Path(self._folder.name) / "engine.log"
            host = GroupSpec(
                factory=f"{__name__}:make_host", kind="engine", name="engine", log_file=log_file
            )
            self._group = open_group(cluster, host)
        self.settings = self._group.call(0, "rebuild", spec.kwargs).result(timeout_s=TIMEOUT_S)
        return Seat(self._group, on_end=self._end)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Runs have their engine here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "open_group", self.open)
            yield

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._group is not None:
            with suppress(WorkerError):
                self._group.close()
            self._group = None
