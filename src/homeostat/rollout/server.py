"""The worker's half of an engine in a separate process: it calls the engine for RemoteEngine.

    remote.py: RemoteEngine -> WorkerGroup of one -> EngineServer -> any Engine

Every reply includes the engine's version and counts, so reading them needs no call.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from homeostat.errors import EngineError
from homeostat.rollout.engine import Engine, EngineStats, Request
from homeostat.workers.context import WorkerContext

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket

# Import path of the factory that a worker calls to host an engine.
SERVER = "homeostat.rollout.server:serve_engine"


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call, and the state of the engine after it.

    `refused` holds the id of each queued request that cannot be served, and the reason.
    """

    value: Any
    policy_version: int
    received_checksum: str | None
    stats: EngineStats
    refused: tuple[tuple[str, str], ...] = ()


def serve_engine(
    context: WorkerContext, *, factory: str, kwargs: Mapping[str, Any]
) -> EngineServer:
    """Build an engine by its factory, named by import path, and serve it."""
    module, _, name = factory.partition(":")
    return EngineServer(getattr(importlib.import_module(module), name)(context, **kwargs))


class EngineServer:
    """Calls one engine. `verb` calls any method of the Engine protocol by its name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def exchange(self, requests: Sequence[Request], timeout_s: float) -> Reply:
        """Submit these requests, then poll."""
        refused = self._submit(requests)
        return self._reply(self.engine.poll(timeout_s=timeout_s), refused)

    def submit(self, requests: Sequence[Request]) -> Reply:
        return self._reply(None, self._submit(requests))

    def verb(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reply:
        return self._reply(getattr(self.engine, name)(*args, **kwargs))

    def stage(self, bucket: Bucket) -> Reply:
        self.engine.stage(bucket)
        return self._reply(None)

    def about(self) -> Reply:
        return self._reply((self.engine.capabilities, self.engine.policy_id))

    def health(self) -> str | None:
        return self.engine.health()

    def close(self) -> None:
        self.engine.close()

    def _submit(self, requests: Sequence[Request]) -> tuple[tuple[str, str], ...]:
        refused = []
        for request in requests:
            try:
                self.engine.submit(request)
            except EngineError as error:
                refused.append((request.id, str(error)))
        return tuple(refused)

    def _reply(self, value: Any, refused: tuple[tuple[str, str], ...] = ()) -> Reply:
        engine = self.engine
        return Reply(
            value,
            engine.policy_version,
            engine.received_checksum,
            engine.stats(),
            refused,
        )
