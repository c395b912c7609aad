"""One engine out of several: requests are dealt to the one in this process and to helpers.

    submit -> by session to own engine or a helper -> poll: own steps; threads wait for helpers

On a CPU a decoding step is too small to be worth a second thread, while half of the requests in a
second process are. Towards the outside it is the own engine, which shares the trainer's weights; a
helper has a copy, sent at every commit.

Invariants: the requests of one session are together, and who gets them depends on the order of
submission alone, so that a run repeats itself to the bit; a helper that dies loses nothing: its
requests begin again in the own engine, to the same tokens (their noise is their own), and the run
goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from homeostat.errors import EngineDiedError, EngineError, PolicyNotFiniteError
from homeostat.rollout.engine import Capabilities, Engine, EngineStats, Quiesce, Request
from homeostat.rollout.remote import RemoteEngine
from homeostat.types import Completion, FloatArray, TokenRow

if TYPE_CHECKING:
    from homeostat.sync.parcel import Parcel, Transport

T = TypeVar("T")

# How long a helper is waited for at a time: other verbs wait for the end of such a wait.
SLICE_SECONDS = 0.5

# Sends the weights of a version to a helper; what is in flight there is quiesced so.
GiveWeights = Callable[[RemoteEngine, int, Quiesce], None]


class SplitEngine:
    """Implements `rollout.engine.Engine`. `on_loss` is told of a helper that died."""

    def __init__(
        self,
        own: Engine,
        helpers: Sequence[RemoteEngine],
        *,
        give_weights: GiveWeights,
        on_loss: Callable[[EngineDiedError], None],
    ) -> None:
        self.own = own
        self.helpers = list(helpers)
        self.give_weights = give_weights
        self.on_loss = on_loss
        self._threads = ThreadPoolExecutor(len(helpers), thread_name_prefix="helper")
        self._polls: dict[RemoteEngine, Future[list[Completion]]] = {}
        # Of what is in flight: the request, and who has it.
        self._flying: dict[str, tuple[Request, Engine]] = {}
        self._sessions: dict[str, Engine] = {}
        self._loads: dict[Engine, int] = {}
        self._held: list[Completion] = []
        self._lost = EngineStats()
        self._how = Quiesce.DRAIN
        self._is_updating = self._is_asleep = False
        for helper in helpers:
            self._of(helper, partial(give_weights, helper, own.policy_version, Quiesce.DRAIN))

    @property
    def capabilities(self) -> Capabilities:
        return self.own.capabilities

    @property
    def policy_version(self) -> int:
        return self.own.policy_version

    @property
    def received_checksum(self) -> str | None:
        return self.own.received_checksum

    def submit(self, request: Request) -> None:
        self._require_settled("submit")
        if request.id in self._flying:
            raise EngineError(f"a request with the id {request.id!r} is in the engine already.")
        self._settle()
        if self._is_asleep:
            self.wake()
        engine = self._engine_for(request)
        engine.submit(request)
        self._flying[request.id] = (request, engine)
        self._loads[engine] = self._loads.get(engine, 0) + 1
        if request.session_key is not None:
            self._sessions[request.session_key] = engine

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self._require_settled("poll")
        if self._flying and self._is_asleep:
            raise EngineError(
                f"the engine and its helpers are asleep with {len(self._flying)} requests in "
                "flight: call wake() before poll()."
            )
        until = time.monotonic() + timeout_s
        while self._flying and not self._held:
            patience = max(0.0, min(SLICE_SECONDS, until - time.monotonic()))
            self._ask_helpers(patience)
            if any(engine is self.own for _, engine in self._flying.values()):
                self._take(self.own.poll(timeout_s=patience))
            else:
                wait(self._polls.values(), timeout=patience, return_when=FIRST_COMPLETED)
            for helper, polled in list(self._polls.items()):
                if polled.done():
                    # First: what it raises is told once.
                    del self._polls[helper]
                    self._take(self._of(helper, polled.result) or [])
            if time.monotonic() >= until:
                break
        found, self._held = self._held, []
        return found

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        self._settle()
        wanted = list(self._flying) if ids is None else [id for id in ids if id in self._flying]
        ended: list[Completion] = []
        for engine in (*self.helpers, self.own):
            mine = [id for id in wanted if id in self._flying and self._flying[id][1] is engine]
            ended += self._of(engine, lambda mine=mine, engine=engine: engine.abort(mine)) or []
        for completion in ended:
            self._flying.pop(completion.request_id, None)
        return ended

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        return self.own.score(rows, temperature=temperature)

    def connect(self, transport: Transport) -> None:
        self.own.connect(transport)

    def begin_update(self, how: Quiesce) -> list[Completion]:
        """Helpers have weights of their own: they may go on until the commit."""
        self._require_settled("begin_update")
        self._how = how
        ended = self.abort() if how is Quiesce.ABORT else []
        self._settle()
        ended += self.own.begin_update(how)
        self._is_updating = True
        return ended

    def apply(self, parcel: Parcel) -> None:
        self.own.apply(parcel)

    def commit(self, version: int) -> None:
        self.own.commit(version)
        self._is_updating = False
        for helper in list(self.helpers):
            self._of(helper, lambda helper=helper: self.give_weights(helper, version, self._how))

    def sleep(self) -> None:
        self._settle()
        self._is_asleep = True
        self.own.sleep()
        for helper in list(self.helpers):
            self._of(helper, helper.sleep)

    def wake(self) -> None:
        self._settle()
        self._is_asleep = False
        self.own.wake()
        for helper in list(self.helpers):
            self._of(helper, helper.wake)

    def health(self) -> str | None:
        return self.own.health()

    def stats(self) -> EngineStats:
        parts = [self._lost, *(engine.stats() for engine in (self.own, *self.helpers))]
        return _sum(parts)

    def close(self) -> None:
        for helper in self.helpers:
            helper.close()
        wait(self._polls.values())
        self._threads.shutdown()
        self._polls.clear()
        self.helpers.clear()
        self._flying.clear()
        self._held.clear()
        self.own.close()

    def _engine_for(self, request: Request) -> Engine:
        """Who has the session already, else who has been given the least."""
        if not self._flying:
            self._sessions.clear()
            self._loads.clear()
        known = self._sessions.get(request.session_key or "")
        engines: tuple[Engine, ...] = (self.own, *self.helpers)
        return known or min(engines, key=lambda engine: self._loads.get(engine, 0))

    def _ask_helpers(self, patience: float) -> None:
        busy = {engine for _, engine in self._flying.values()}
        for helper in self.helpers:
            if helper in busy and helper not in self._polls:
                self._polls[helper] = self._threads.submit(helper.poll, timeout_s=patience)

    def _settle(self) -> None:
        """No thread is at a helper when this returns."""
        for helper, polled in list(self._polls.items()):
            del self._polls[helper]
            # Nobody waits for it now; the next poll will be told of what is still wrong then.
            with suppress(PolicyNotFiniteError):
                self._take(self._of(helper, polled.result) or [])

    def _require_settled(self, verb: str) -> None:
        if self._is_updating:
            raise EngineError(f"{verb}() between begin_update() and commit(): weights may change.")

    def _take(self, finished: list[Completion]) -> None:
        for completion in finished:
            del self._flying[completion.request_id]
        self._held += finished

    def _of(self, engine: Engine, call: Callable[[], T]) -> T | None:
        """What a call gives, or None where the helper turns out to be dead."""
        try:
            return call()
        except EngineDiedError as error:
            self._lose(engine, error)
            return None

    def _lose(self, engine: Engine, error: EngineDiedError) -> None:
        assert isinstance(engine, RemoteEngine), "the own engine has no process that could die"
        self.on_loss(error)
        self._lost = _sum([self._lost, engine.stats()])
        self.helpers.remove(engine)
        engine.close()
        self._sessions = {key: at for key, at in self._sessions.items() if at is not engine}
        for request, at in list(self._flying.values()):
            if at is engine:
                self.own.submit(request)
                self._flying[request.id] = (request, self.own)


def _sum(parts: Sequence[EngineStats]) -> EngineStats:
    names = [field.name for field in fields(EngineStats)]
    return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in names})
