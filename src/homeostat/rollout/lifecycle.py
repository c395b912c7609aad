"""The life-cycle of an engine: its states, the calls that are legal in each, its in-flight
requests.

    settled --begin_update--> updating --commit--> settled ... --close--> closed
    awake --sleep--> asleep --wake, submit, begin_update--> awake

Every engine has one `LifeCycle`, which refuses illegal calls with the same errors in all engines.
An engine asks it before it acts (`require_...`), does its own work, then records the new state.

Invariants: every in-flight request has a unique id and comes back exactly once; versions never go
back; weights of another policy are refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from homeostat.errors import EngineError
from homeostat.rollout.engine import Request
from homeostat.sync.bucket import TensorEntry, entries_checksum
from homeostat.types import POLICY_ID, Completion

F = TypeVar("F")

BROKEN = "an update broke off: its weights are part old and part new"


class LifeCycle(Generic[F]):
    """The state of one engine. `in_flight` maps the id of a request to its state in the engine.

    `name` is the engine's name in errors. If the engine cannot serve, `problem` says why.
    `received` lists the tensors that arrived since the last `begin_update`.
    """

    def __init__(self, name: str, *, policy_id: str = POLICY_ID, version: int = 0) -> None:
        self.name = name
        self.policy_id = policy_id
        self.version = version
        self.is_updating = self.is_asleep = self.is_closed = False
        self.is_connected = False
        self.problem: str | None = None
        self.in_flight: dict[str, F] = {}
        self.finished: list[Completion] = []
        self.received: list[TensorEntry] = []

    # Requests.

    def require_new(self, request: Request) -> None:
        """Refuse a request for another policy, or one whose id is in flight."""
        if request.policy_id != self.policy_id:
            raise EngineError(
                f"request {request.id!r} is for the policy {request.policy_id!r}, and the "
                f"{self.name} engine serves {self.policy_id!r}."
            )
        if request.id in self.in_flight:
            raise EngineError(f"a request with the id {request.id!r} is in the engine already.")

    def known(self, ids: Iterable[str] | None) -> list[str]:
        """Return which of the ids are in flight, each once. For None, return all that are in
        flight.
        """
        if ids is None:
            return list(self.in_flight)
        return [id for id in dict.fromkeys(ids) if id in self.in_flight]

    def take_finished(self) -> list[Completion]:
        """Return completions that were not returned yet, in the order in which they finished."""
        finished, self.finished = self.finished, []
        return finished

    # States.

    def require_open(self) -> None:
        if self.is_closed:
            raise EngineError(f"the {self.name} engine is closed.")

    def require_settled(self, verb: str) -> None:
        """Refuse a call that computes or starts an update while weights may change."""
        self.require_open()
        if self.is_updating:
            raise EngineError(f"{verb}() between begin_update() and commit(): weights may change.")

    def require_pollable(self) -> None:
        self.require_settled("poll")
        if self.in_flight and self.is_asleep:
            raise EngineError(
                f"the {self.name} engine is asleep with {len(self.in_flight)} requests in flight: "
                "call wake() before poll()."
            )

    def close(self) -> None:
        """Record that the engine is closed, and forget its in-flight requests."""
        self.in_flight.clear()
        self.finished.clear()
        self.is_closed = True

    def health(self) -> str | None:
        return "it is closed" if self.is_closed else self.problem

    # Weights.

    @property
    def received_checksum(self) -> str | None:
        """Checksum of the received tensors, as in the sender's manifest; None without any."""
        if not self.received:
            return None
        return entries_checksum(self.received, policy_id=self.policy_id)

    def require_update(self, policy_id: str) -> None:
        """Refuse a `begin_update` that is not legal now, or of another policy."""
        self.require_settled("begin_update")
        self._require_policy("begin_update", policy_id)

    def begin_update(self) -> None:
        self.received.clear()
        self.is_updating = True

    def require_receiving(self) -> None:
        """Refuse an `apply` without a preceding `connect` and `begin_update`."""
        if not (self.is_updating and self.is_connected):
            missing = "connect()" if self.is_updating else "begin_update()"
            raise EngineError(f"apply() without {missing}: the engine was not made ready.")

    def require_commit(self, version: int, policy_id: str) -> None:
        if not self.is_updating:
            raise EngineError("commit() without begin_update(): the engine was not made ready.")
        self._require_policy("commit", policy_id)
        if version < self.version:
            raise EngineError(
                f"commit() of version {version} after {self.version}: versions never go back."
            )

    def commit(self, version: int) -> None:
        self.version = version
        self.is_updating = False
        self.problem = None

    def break_off(self, problem: str = BROKEN) -> None:
        """Record that an update cannot be finished. The engine serves nothing until the next
        update.
        """
        self.received.clear()
        self.is_updating = False
        self.problem = problem

    def _require_policy(self, verb: str, policy_id: str) -> None:
        if policy_id != self.policy_id:
            raise EngineError(
                f"{verb}() with weights of the policy {policy_id!r}: the {self.name} engine serves "
                f"{self.policy_id!r}, and must not sample from another one under its name."
            )
