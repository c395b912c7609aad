"""An engine in a separate process: the same protocol, with one call to a worker per method.

    controller: RemoteEngine -> WorkerGroup of one -> worker: EngineServer (server.py) -> any Engine

Submitted requests are queued and sent together with the next call. Every reply includes the
engine's version and counts, so reading them needs no call. Every wait has a deadline. If the worker
is still busy when the time of a poll is over, the poll returns nothing, and the next poll receives
the answer. A worker that does not answer for longer than `timeout_s` counts as hung: a report is
written, and the worker is ended and treated as dead.

If the process dies, no request is lost: the controller keeps the round (everything submitted since
no request was in flight), and `restart` queues it again from its start. Completions that were
returned already are sampled again and dropped, so that the new process gets the same batches as the
old one. The other completions are then bitwise the same, if the engine is deterministic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from homeostat.arrays import FloatArray
from homeostat.errors import (
    EngineDiedError,
    EngineError,
    NodeLostError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
)
from homeostat.rollout.checks import require_servable
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.lifecycle import LifeCycle
from homeostat.rollout.server import Reply
from homeostat.types import POLICY_ID, Completion, TokenRow
from homeostat.workers.group import Pending, WorkerGroup

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Transport

T = TypeVar("T")

# Additional time that a poll waits for a worker that is in the middle of a step.
GRACE_SECONDS = 5.0
HEALTH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Deadline:
    setting: str
    seconds: float


class RemoteEngine:
    """Implements `rollout.engine.Engine` over a worker.

    `start` makes the group, whose worker is made by `serve_engine`. `timeout_s` bounds every call,
    `update_timeout_s` those of an update; a poll has its own time. `vocabulary` and `can_decode`
    are used to check requests before they are sent. `on_death` is called when the process is found
    dead. It returns if the call may be retried after `restart`, and raises otherwise. Calls of a
    weight update are never repeated: the sender of the weights must begin again.
    """

    def __init__(
        self,
        start: Callable[[], WorkerGroup],
        *,
        vocabulary: int,
        can_decode: bool,
        timeout_s: float,
        update_timeout_s: float,
    ) -> None:
        self.vocabulary = vocabulary
        self.can_decode = can_decode
        self.timeout_s = timeout_s
        self.update_timeout_s = update_timeout_s
        self.on_death: Callable[[EngineDiedError], None] = _raise
        self._start = start
        # All requests of the round, and those that are not sent yet.
        self._round: dict[str, Request] = {}
        self._queue: list[tuple[Request, float]] = []
        self._late: Pending[Reply] | None = None
        # When a late answer counts as a hang.
        self._late_limit = 0.0
        self._group, self._known = self._begun()
        self.capabilities: Capabilities
        served, policy_id = self._known.value
        self.capabilities = replace(served, own_process=True)
        self.life: LifeCycle[Request] = LifeCycle(
            self.capabilities.name, policy_id=policy_id, version=self._known.policy_version
        )

    @property
    def policy_id(self) -> str:
        return self.life.policy_id

    @property
    def policy_version(self) -> int:
        return self.life.version

    @property
    def name(self) -> str:
        """The name of the engine's process. Logs and errors distinguish engines by it."""
        return self._group.name

    @property
    def received_checksum(self) -> str | None:
        return self._known.received_checksum

    def stats(self) -> EngineStats:
        return self._known.stats

    def submit(self, request: Request) -> None:
        self.life.require_settled("submit")
        require_servable(
            request,
            self.capabilities,
            vocabulary=self.vocabulary,
            can_decode=self.can_decode,
        )
        self.life.require_new(request)
        if not self.life.in_flight:
            self._round.clear()
        self._round[request.id] = self.life.in_flight[request.id] = request
        self._queue.append((request, time.monotonic()))
        # The worker's engine wakes when the request arrives.
        self.life.is_asleep = False

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self.life.require_pollable()
        until = time.monotonic() + timeout_s
        while self.life.in_flight and not self.life.finished:
            try:
                self._exchange(max(0.0, until - time.monotonic()))
            except EngineDiedError as error:
                self.on_death(error)
                until = time.monotonic() + timeout_s
            if time.monotonic() >= until:
                break
        return self.life.take_finished()

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        wanted = None if ids is None else list(ids)
        return self._handed_out(self._lasting("abort", wanted))

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        self.life.require_settled("score")
        return self._lasting("score", list(rows), temperature=temperature)

    def connect(self, transport: Transport) -> None:
        self._update("connect", transport)
        self.life.is_connected = True

    def begin_update(self, how: Quiesce, *, policy_id: str = POLICY_ID) -> list[Completion]:
        self.life.require_update(policy_id)
        ended = self._update("begin_update", how, policy_id=policy_id)
        self.life.begin_update()
        self.life.is_asleep = False
        return self._handed_out(ended)

    def apply(self, bucket: Bucket) -> None:
        self.life.require_receiving()
        self._update("apply", bucket)

    def commit(self, version: int, *, policy_id: str = POLICY_ID) -> None:
        self.life.require_commit(version, policy_id)
        self._update("commit", version, policy_id=policy_id)
        self.life.commit(version)

    def stage(self, bucket: Bucket) -> None:
        """The worker handles it between two polls, which are short if a thread polls
        (background.py). This method changes nothing that a poll changes.
        """
        deadline = _Deadline("sync.timeout_s", self.update_timeout_s)
        self._settled("stage", self._call("stage", bucket), deadline)

    def cancel_update(self) -> None:
        self._update("cancel_update")
        if self.life.is_updating:
            self.life.break_off()

    def sleep(self) -> None:
        self._lasting("sleep")
        self.life.is_asleep = True

    def wake(self) -> None:
        self._lasting("wake")
        self.life.is_asleep = False

    def health(self) -> str | None:
        if self.life.is_closed:
            return self.life.health()
        problem = self._group.health()
        if problem is not None:
            return problem
        try:
            return self._group.call(0, "health").result(timeout_s=HEALTH_SECONDS)
        except WorkerError as error:
            return str(error)

    def death(self) -> EngineDiedError | None:
        """Ping the process, and end it if it does not answer. Returns None if it is alive."""
        try:
            self._group.call(0, "health").result(timeout_s=HEALTH_SECONDS)
        except WorkerDiedError as error:
            return self._died(error)
        except WorkerHungError as error:
            return self._hung(str(error))
        except WorkerError:
            return None
        return None

    def close(self) -> None:
        self.life.close()
        self._known = replace(self._known, stats=replace(self.stats(), cache_bytes=0))
        self._group.close()

    def restart(self, give_weights: Callable[[], T]) -> T:
        """Start a process that replaces the dead one, and queue the round again.

        Returns the result of `give_weights`. The new process can die as well: then this raises
        EngineDiedError, or the error of `give_weights`, and may be called again.
        """
        self._group.close()
        self._late = None
        self._queue.clear()
        self._group, self._known = self._begun()
        self.life.version = self._known.policy_version
        self.life.is_updating = self.life.is_asleep = self.life.is_connected = False
        given = give_weights()
        if not self.life.in_flight:
            # The round was complete, so nothing is queued again.
            self._round.clear()
        self._queue = [(request, time.monotonic()) for request in self._round.values()]
        return given

    def _begun(self) -> tuple[WorkerGroup, Reply]:
        """Start a process. Returns the process and the state of its engine."""
        try:
            group = self._start()
        except NodeLostError:
            # Another process would not find room either, so the whole run waits or shrinks.
            raise
        except WorkerDiedError as error:
            raise EngineDiedError(f"the engine's process died as it started: {error}") from None
        except WorkerError as error:
            raise EngineError(
                f"the engine's process did not start: {error}\n"
                "Where it needs longer, raise engine.start_timeout_s."
            ) from None
        try:
            return group, group.call(0, "about").result(timeout_s=self.timeout_s)
        except WorkerDiedError as error:
            group.close()
            raise EngineDiedError(f"the engine's process died as it started: {error}") from None
        except WorkerError as error:
            group.close()
            raise EngineError(
                f"the engine's process started, and does not answer: {error}\n"
                "Where it needs longer, raise engine.stall_s."
            ) from None

    def _exchange(self, timeout_s: float) -> None:
        """Poll the worker, or wait for the answer to an earlier poll that was late."""
        if self._late is None:
            self._late = self._call("exchange", self._taken(), timeout_s)
            self._late.label = "sample"
            patience_s = max(timeout_s + GRACE_SECONDS, self.timeout_s)
            self._late_limit = time.monotonic() + patience_s
        pending, self._late = self._late, None
        reply = self._awaited(pending, timeout_s + GRACE_SECONDS)
        if reply is None:
            self._late = pending
            if time.monotonic() >= self._late_limit:
                owed = f"no answer to a poll within {self.timeout_s:g} s (engine.stall_s)."
                raise self._hung(owed)
        else:
            self.life.finished += self._handed_out(self._learned(reply).value)

    def _lasting(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call that can be repeated with another process."""
        while True:
            try:
                return self._ask(verb, args, kwargs, _Deadline("engine.stall_s", self.timeout_s))
            except EngineDiedError as error:
                self.on_death(error)

    def _update(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return self._ask(verb, args, kwargs, _Deadline("sync.timeout_s", self.update_timeout_s))

    def _ask(
        self, verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], deadline: _Deadline
    ) -> Any:
        """Make a call; requests that were submitted before are sent first."""
        self.life.require_open()
        if self._late is not None:
            self._exchange(deadline.seconds)
        if self._queue:
            self._learned(self._settled("submit", self._call("submit", self._taken()), deadline))
        pending = self._call("verb", verb, args, kwargs)
        pending.label = verb
        return self._learned(self._settled(verb, pending, deadline)).value

    def _settled(self, verb: str, pending: Pending[Reply], deadline: _Deadline) -> Reply:
        reply = self._awaited(pending, deadline.seconds)
        if reply is None:
            raise self._hung(
                f"no answer to {verb!r} within {deadline.seconds:g} s ({deadline.setting})."
            )
        return reply

    def _call(self, method: str, *args: Any) -> Pending[Reply]:
        try:
            return self._group.call(0, method, *args)
        except WorkerError as error:
            raise self._died(error) from None

    def _awaited(self, pending: Pending[Reply], timeout_s: float) -> Reply | None:
        """Return the answer, or None if it does not arrive in time."""
        try:
            return pending.result(timeout_s=timeout_s)
        except WorkerError as error:
            if not pending.future.done():
                return None
            if pending.future.exception() is not error:
                # The answer arrived just after the wait ended.
                return self._awaited(pending, 0.0)
            if self._group.health() is None:
                # The worker is alive: this error came from its engine.
                raise EngineError(str(error)) from None
            raise self._died(error) from None

    def _died(self, error: WorkerError) -> EngineDiedError:
        return EngineDiedError(f"the {self.capabilities.name} engine's process is gone: {error}")

    def _hung(self, owed: str) -> EngineDiedError:
        """Write a report on a process that does not answer, and end it."""
        report = self._group.report_hang()
        self._group.abandon()
        return EngineDiedError(
            f"the {self.capabilities.name} engine's process hangs: {owed}\n{report}"
        )

    def _learned(self, reply: Reply) -> Reply:
        self._known = reply
        self.life.version = reply.policy_version
        if reply.refused:
            for id, _ in reply.refused:
                self.life.in_flight.pop(id, None)
                self._round.pop(id, None)
            # Completions that arrived with the refusal are kept for the next poll.
            if isinstance(reply.value, list):
                self.life.finished += self._handed_out(reply.value)
            raise EngineError(reply.refused[0][1])
        return reply

    def _taken(self) -> list[Request]:
        """Return the queued requests, with their waiting time subtracted from their deadlines."""
        now = time.monotonic()
        taken, self._queue = self._queue, []
        return [
            request
            if request.deadline_s is None
            else replace(request, deadline_s=request.deadline_s - (now - since))
            for request, since in taken
        ]

    def _handed_out(self, completions: list[Completion]) -> list[Completion]:
        """Return the completions that were not handed out yet. A segment that had begun earlier is
        the request's own object, not a copy, unless the engine completed its columns."""
        new = [one for one in completions if one.request_id in self.life.in_flight]
        requests = [self.life.in_flight.pop(one.request_id) for one in new]
        return [
            one
            if request.routed_experts
            else replace(one, segments=request.begun + one.segments[len(request.begun) :])
            for one, request in zip(new, requests, strict=True)
        ]


def _raise(error: EngineDiedError) -> NoReturn:
    raise error
