"""An engine in another process that mirrors the trainer's weights: they are sent at every commit.

    Router([engine that shares the weights, MirrorEngine, MirrorEngine, ...])

To the router, and so to the run, it looks like an engine that shares the trainer's weights. Between
`begin_update` and `commit` its own copy does not change, so it may keep computing until the commit;
the router refuses calls in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from homeostat.arrays import FloatArray
from homeostat.errors import EngineError
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.remote import RemoteEngine
from homeostat.types import POLICY_ID, Completion, TokenRow

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Transport

# Sends the trainer's weights to the engine, as this version, with this treatment of in-flight
# requests.
SendWeights = Callable[[RemoteEngine, int, Quiesce], None]


class MirrorEngine:
    """Implements `rollout.engine.Engine`. It has the trainer's weights when the constructor
    returns.
    """

    def __init__(self, remote: RemoteEngine, *, version: int, send_weights: SendWeights) -> None:
        self.remote = remote
        self.send_weights = send_weights
        self._how = Quiesce.DRAIN
        send_weights(remote, version, self._how)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.remote.capabilities, shares_weights=True, stages=False)

    @property
    def policy_id(self) -> str:
        return self.remote.policy_id

    @property
    def policy_version(self) -> int:
        return self.remote.policy_version

    @property
    def received_checksum(self) -> str | None:
        return None

    def submit(self, request: Request) -> None:
        self.remote.submit(request)

    def poll(self, *, timeout_s: float) -> list[Completion]:
        return self.remote.poll(timeout_s=timeout_s)

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        return self.remote.abort(ids)

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        return self.remote.score(rows, temperature=temperature)

    def connect(self, transport: Transport) -> None:
        raise EngineError("the engine mirrors the trainer's weights: it is sent them at commit().")

    def begin_update(self, how: Quiesce, *, policy_id: str = POLICY_ID) -> list[Completion]:
        self.remote.life.require_update(policy_id)
        self._how = how
        return self.remote.abort() if how is Quiesce.ABORT else []

    def apply(self, bucket: Bucket) -> None:
        raise EngineError("the engine mirrors the trainer's weights: it is sent them at commit().")

    def commit(self, version: int, *, policy_id: str = POLICY_ID) -> None:
        self.send_weights(self.remote, version, self._how)

    def stage(self, bucket: Bucket) -> None:
        raise EngineError("the engine mirrors the trainer's weights: it is sent them at commit().")

    def cancel_update(self) -> None:
        """Do nothing: the mirror's copy of the weights does not change before the commit."""

    def sleep(self) -> None:
        self.remote.sleep()

    def wake(self) -> None:
        self.remote.wake()

    def health(self) -> str | None:
        return self.remote.health()

    def stats(self) -> EngineStats:
        return self.remote.stats()

    def close(self) -> None:
        self.remote.close()
