"""A router that presents several engines of one type and policy as one engine.

    submit -> by session, else to the engine that was dealt the fewest -> poll: all of them

Engines may be in this process or in others. Those in others compute at the same time, each polled
by a thread; those in this process take turns. Weights, sleep and close go to all of them.

Invariants: the engine of a request depends only on the order of submission, never on load or
timing, so that a run is bitwise repeatable. Requests of one session go to one engine, which has the
session's cache, until new weights invalidate the cache. A request samples the same tokens in every
engine, because its noise depends only on the request. If an engine dies, nothing is lost: its
requests start again in the others, and a new engine may `join` in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

from homeostat.arrays import FloatArray
from homeostat.errors import EngineDiedError, EngineError, PolicyNotFiniteError
from homeostat.rollout.engine import Capabilities, Engine, EngineStats, Quiesce, Request
from homeostat.rollout.lifecycle import LifeCycle
from homeostat.types import POLICY_ID, Completion, StopReason, TokenRow

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Packer, Receiver, Transport

T = TypeVar("T")

# Duration of one poll of an engine. Other calls wait until such a poll ends.
SLICE_SECONDS = 0.5
# Number of sessions that are remembered. The least recently used one is forgotten first.
MAX_SESSIONS = 1 << 16


@dataclass(slots=True)
class _Dealt:
    """An in-flight request and its engine; None after that engine died."""

    request: Request
    engine: Engine | None


class Router:
    """Implements `rollout.engine.Engine`.

    `on_loss` is called when an engine died for good. `revive` returns another one, with the
    current weights, when the last one died; without it, the death is raised.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        on_loss: Callable[[Engine, EngineDiedError], None] = lambda engine, error: None,
        revive: Callable[[], Engine] | None = None,
    ) -> None:
        first = engines[0]
        self.engines = list(engines)
        self.on_loss = on_loss
        self.revive = revive
        self.capabilities = common_capabilities([engine.capabilities for engine in engines])
        self.life: LifeCycle[_Dealt] = LifeCycle(
            self.capabilities.name, policy_id=first.policy_id, version=first.policy_version
        )
        for engine in engines:
            served = (engine.policy_id, engine.policy_version)
            assert served == (self.policy_id, self.policy_version), "engines of other weights"
        self._threads = ThreadPoolExecutor(len(engines), thread_name_prefix="router")
        self._polls: dict[Engine, Future[list[Completion]]] = {}
        self._sessions: dict[str, Engine] = {}
        # Number of requests that each engine was dealt since nothing was in flight.
        self._num_dealt: dict[Engine, int] = {}
        self._lost = EngineStats()

    @property
    def policy_id(self) -> str:
        return self.life.policy_id

    @property
    def policy_version(self) -> int:
        return self.life.version

    @property
    def received_checksum(self) -> str | None:
        """The checksum of all engines. If they differ, all of them joined, which matches no
        manifest.
        """
        found = dict.fromkeys(engine.received_checksum for engine in self.engines)
        return next(iter(found)) if len(found) == 1 else " and ".join(map(str, found))

    def submit(self, request: Request) -> None:
        self.life.require_settled("submit")
        self.life.require_new(request)
        self._settle()
        if self.life.is_asleep:
            self.wake()
        if not self.life.in_flight:
            self._num_dealt.clear()
        self.life.in_flight[request.id] = dealt = _Dealt(request, None)
        try:
            self._deal(dealt)
        except EngineError:
            del self.life.in_flight[request.id]
            raise

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self.life.require_pollable()
        until = time.monotonic() + timeout_s
        while self.life.in_flight and not self.life.finished:
            self._deal_again()
            patience = max(0.0, min(SLICE_SECONDS, until - time.monotonic()))
            busy = list(dict.fromkeys(d.engine for d in self.life.in_flight.values() if d.engine))
            self._start_polls(busy, patience)
            self._compute_here(busy, patience)
            for engine, polled in list(self._polls.items()):
                if polled.done():
                    # Removed first, so that what it raises is reported only once.
                    del self._polls[engine]
                    self._take(self._attempt(engine, polled.result))
            if time.monotonic() >= until:
                break
        return self.life.take_finished()

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        self._settle()
        wanted, ended = self.life.known(ids), []
        while wanted:
            engine = self.life.in_flight[wanted[0]].engine
            mine = [id for id in wanted if self.life.in_flight[id].engine is engine]
            if engine is None:
                requests = [self.life.in_flight[id].request for id in mine]
                found = [
                    Completion(r.id, r.begun, StopReason.ABORTED, r.prompt_columns)
                    for r in requests
                ]
            else:
                found = self._attempt(engine, partial(engine.abort, mine))
            if found is not None:
                # Requests that are missing here have finished already; the next poll returns them.
                wanted = [id for id in wanted if id not in mine]
                ended += found
        for completion in ended:
            del self.life.in_flight[completion.request_id]
        return ended

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        self.life.require_settled("score")
        self._settle()
        while True:
            engine = self.engines[0]
            found = self._attempt(engine, partial(engine.score, rows, temperature=temperature))
            if found is not None:
                return found

    def connect(self, transport: Transport) -> None:
        """Connect all engines. Every process of every engine is a separate receiver."""
        size, first = self.capabilities.num_receivers, 0
        for engine in list(self.engines):
            part = SomeReceivers(transport, first=first, size=size)
            first += engine.capabilities.num_receivers
            self._attempt(engine, partial(engine.connect, part))
        self.life.is_connected = True

    def begin_update(self, how: Quiesce, *, policy_id: str = POLICY_ID) -> list[Completion]:
        self.life.require_update(policy_id)
        self._settle()
        ended = self.abort() if how is Quiesce.ABORT else []
        for found in self._all(lambda engine: engine.begin_update(how, policy_id=policy_id)):
            for completion in found:
                del self.life.in_flight[completion.request_id]
            ended += found
        self.life.begin_update()
        self.life.is_asleep = False
        return ended

    def join(self, engine: Engine) -> None:
        """Take in one more engine, which has the weights that the others have."""
        self.life.require_settled("join")
        served = (engine.policy_id, engine.policy_version)
        assert served == (self.policy_id, self.policy_version), "an engine of other weights"
        self.engines.append(engine)
        self.capabilities = common_capabilities([one.capabilities for one in self.engines])

    def score_each(self, rows: Sequence[TokenRow], *, temperature: float) -> list[list[FloatArray]]:
        """Return the scores of each engine."""
        self.life.require_settled("score")
        self._settle()
        return self._all(lambda engine: engine.score(rows, temperature=temperature))

    def apply(self, bucket: Bucket) -> None:
        self.life.require_receiving()
        self._all(lambda engine: engine.apply(bucket))

    def commit(self, version: int, *, policy_id: str = POLICY_ID) -> None:
        self.life.require_commit(version, policy_id)
        self._all(lambda engine: engine.commit(version, policy_id=policy_id))
        self._sessions.clear()
        self.life.commit(version)

    def stage(self, bucket: Bucket) -> None:
        """May run while another thread polls; that poll detects by itself which engines died.

        Raises if any engine did not take in the bucket: the others must not be switched without it.
        """
        engines = list(self.engines)
        with ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="stage") as threads:
            calls = [threads.submit(engine.stage, bucket) for engine in engines]
        for call in calls:
            call.result()

    def cancel_update(self) -> None:
        """Engines that are found dead are lost as in any other call."""
        self._settle()
        if self.life.is_updating:
            self.life.break_off()
        self._all(lambda engine: engine.cancel_update())

    def sleep(self) -> None:
        if not self.life.is_closed:
            self._settle()
            self._all(lambda engine: engine.sleep())
            self.life.is_asleep = True

    def wake(self) -> None:
        self.life.require_open()
        self._settle()
        self._all(lambda engine: engine.wake())
        self.life.is_asleep = False

    def health(self) -> str | None:
        if self.life.is_closed:
            return self.life.health()
        self._settle()
        problems = [engine.health() for engine in self.engines]
        return next((problem for problem in problems if problem is not None), None)

    def stats(self) -> EngineStats:
        return _sum([self._lost, *(engine.stats() for engine in self.engines)])

    def close(self) -> None:
        # Engines in other processes first, because this ends the polls that wait for them.
        for engine in sorted(self.engines, key=lambda e: not e.capabilities.own_process):
            engine.close()
            if engine in self._polls:
                wait([self._polls.pop(engine)])
        self._threads.shutdown()
        self.life.close()

    def _deal(self, dealt: _Dealt) -> None:
        """Give the request to its session's engine, else to the one that was dealt the fewest."""
        key = dealt.request.session_key
        while dealt.engine is None:
            known = None if key is None else self._sessions.pop(key, None)
            engine = known or min(self.engines, key=lambda one: self._num_dealt.get(one, 0))
            dealt.engine = engine
            self._attempt(engine, partial(engine.submit, dealt.request))
        self._num_dealt[dealt.engine] = self._num_dealt.get(dealt.engine, 0) + 1
        if key is not None:
            self._sessions[key] = dealt.engine
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def _deal_again(self) -> None:
        """Deal the requests of engines that died, in the order of submission."""
        if all(dealt.engine is not None for dealt in self.life.in_flight.values()):
            return
        # An engine is given a request only while no thread is at it.
        self._settle()
        for dealt in list(self.life.in_flight.values()):
            if dealt.engine is None:
                self._deal(dealt)

    def _start_polls(self, busy: list[Engine], patience: float) -> None:
        for engine in busy:
            if engine.capabilities.own_process and engine not in self._polls:
                self._polls[engine] = self._threads.submit(engine.poll, timeout_s=patience)

    def _compute_here(self, busy: list[Engine], patience: float) -> None:
        """Let the engines of this process compute, one after another; without any, wait."""
        here = [engine for engine in busy if not engine.capabilities.own_process]
        if not here:
            wait(self._polls.values(), timeout=patience, return_when=FIRST_COMPLETED)
        for engine in here:
            share = 0.0 if self.life.finished else patience / len(here)
            self._take(self._attempt(engine, partial(engine.poll, timeout_s=share)))

    def _settle(self) -> None:
        """Wait until no thread is at an engine."""
        for engine, polled in list(self._polls.items()):
            del self._polls[engine]
            # No caller waits for it now. If the problem persists, the next poll reports it.
            with suppress(PolicyNotFiniteError):
                self._take(self._attempt(engine, polled.result))

    def _take(self, finished: list[Completion] | None) -> None:
        for completion in finished or ():
            del self.life.in_flight[completion.request_id]
            self.life.finished.append(completion)

    def _all(self, call: Callable[[Engine], T]) -> list[T]:
        """Call every engine, those in other processes at the same time. No poll is under way."""
        apart = [engine for engine in self.engines if engine.capabilities.own_process]
        calls = {engine: self._threads.submit(call, engine) for engine in apart}
        try:
            answers = [
                self._attempt(
                    engine, calls[engine].result if engine in calls else partial(call, engine)
                )
                for engine in list(self.engines)
            ]
        finally:
            wait(calls.values())
        return [answer for answer in answers if answer is not None]

    def _attempt(self, engine: Engine, call: Callable[[], T]) -> T | None:
        """Return the result of a call to an engine, or None if the engine turns out to be dead."""
        try:
            return call()
        except EngineDiedError as error:
            self._lose(engine, error)
            return None

    def _lose(self, engine: Engine, error: EngineDiedError) -> None:
        """Continue without an engine. The next poll deals its requests again."""
        is_last = len(self.engines) == 1
        if is_last and (self.revive is None or self.life.is_updating):
            raise error
        self.on_loss(engine, error)
        engine.close()
        self._lost = _sum([self._lost, engine.stats()])
        self.engines.remove(engine)
        if is_last:
            assert self.revive is not None
            self.join(self.revive())
        self.capabilities = common_capabilities([one.capabilities for one in self.engines])
        self._sessions = {key: at for key, at in self._sessions.items() if at is not engine}
        for dealt in self.life.in_flight.values():
            if dealt.engine is engine:
                dealt.engine = None


@dataclass(frozen=True, slots=True)
class SomeReceivers:
    """A transport for one of several engines: its processes are receivers `first`, `first` + 1, ...
    of `size` in all."""

    transport: Transport
    first: int
    size: int

    name: ClassVar[str] = "part of a transport"

    def packer(self) -> Packer:
        return self.transport.packer()

    def receiver(self, rank: int, size: int) -> Receiver:
        return self.transport.receiver(self.first + rank, self.size)


def common_capabilities(all_of: Sequence[Capabilities]) -> Capabilities:
    """Return what every one of the engines can do."""
    first = all_of[0]
    for one in all_of:
        kinds = (one.name, one.shares_weights)
        assert kinds == (first.name, first.shares_weights), "a router is of engines of one kind"
    limits = [one.max_tokens for one in all_of if one.max_tokens is not None]
    scores_any = all(one.score_temperatures == "any" for one in all_of)
    without_routes = next((one for one in all_of if not one.routed_experts), first)
    without_kept = next((one for one in all_of if not one.kept_ids), first)
    return Capabilities(
        name=first.name,
        shares_weights=first.shares_weights,
        batch_invariant=all(one.batch_invariant for one in all_of),
        quiesce=frozenset.intersection(*(one.quiesce for one in all_of)),
        max_tokens=min(limits, default=None),
        resumes_exactly=all(one.resumes_exactly for one in all_of),
        score_temperatures="any" if scores_any else "one",
        cut_logp=all(one.cut_logp for one in all_of),
        own_process=all(one.own_process for one in all_of),
        num_receivers=sum(one.num_receivers for one in all_of),
        stages=all(one.stages for one in all_of),
        routed_experts=without_routes.routed_experts,
        why_no_routes=without_routes.why_no_routes,
        routed_weights=all(one.routed_weights for one in all_of),
        kept_ids=without_kept.kept_ids,
        why_no_kept_ids=without_kept.why_no_kept_ids,
    )


def _sum(parts: Sequence[EngineStats]) -> EngineStats:
    names = [field.name for field in fields(EngineStats)]
    return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in names})
