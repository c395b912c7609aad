"""The base of engines that compute in the calling process, one step at a time.

    submit -> Flight -> _start ... poll: _step, _step, ... -> Completion

It manages the life-cycle and the flights: legal calls, limits, deadlines, draining, the order of
completions. A subclass implements how a flight is started, advanced and dropped, how quiescing and
new weights affect its memory, and what sleep frees.

Invariant: a request in flight comes back exactly once, from `poll`, `abort` or `begin_update`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from homeostat.arrays import FloatArray
from homeostat.errors import EngineError, PolicyNotFiniteError
from homeostat.rollout.checks import require_servable
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.flight import Flight
from homeostat.rollout.lifecycle import LifeCycle
from homeostat.types import POLICY_ID, Completion, StopReason, TokenRow

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Transport

F = TypeVar("F", bound=Flight)


class SteppingEngine(ABC, Generic[F]):
    """Implements `rollout.engine.Engine` except for `score` and `stats`.

    `vocabulary` is the number of tokens that the model knows; `decode` turns tokens into text, in
    which stop strings are searched. It is None if no request may have stop strings.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        vocabulary: int,
        decode: Callable[[Sequence[int]], str] | None,
        policy_id: str,
        policy_version: int,
    ) -> None:
        assert capabilities.max_tokens is not None, capabilities
        self.capabilities = capabilities
        self.max_tokens = capabilities.max_tokens
        self.vocabulary = vocabulary
        self.decode = decode
        self.life: LifeCycle[F] = LifeCycle(
            capabilities.name, policy_id=policy_id, version=policy_version
        )
        self._num_submitted = 0
        self._next_expiry = math.inf

    @property
    def policy_id(self) -> str:
        return self.life.policy_id

    @property
    def policy_version(self) -> int:
        return self.life.version

    @property
    def received_checksum(self) -> str | None:
        return self.life.received_checksum

    def submit(self, request: Request) -> None:
        self.life.require_settled("submit")
        self._require_servable(request)
        self.life.require_new(request)
        self.wake()
        flight = self._flight(request, number=self._num_submitted, now=time.monotonic())
        self._require_room(flight)
        self._num_submitted += 1
        reason = flight.given_end()
        if reason is not None:
            self.life.finished.append(flight.completion(reason))
            return
        self.life.in_flight[request.id] = flight
        if flight.expires is not None:
            self._next_expiry = min(self._next_expiry, flight.expires)
        self._start(flight)

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self.life.require_pollable()
        until = time.monotonic() + timeout_s
        with self._computing():
            while self.life.in_flight and not self.life.finished:
                self._advance(until)
                if time.monotonic() >= until:
                    break
        return self.life.take_finished()

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        self._land()
        flights = [self.life.in_flight[id] for id in self.life.known(ids)]
        return [self._end(flight, StopReason.ABORTED) for flight in flights]

    def sampled_so_far(self, id: str) -> Sequence[int]:
        """Return the tokens that a request in flight has sampled; nothing once it has ended."""
        flight = self.life.in_flight.get(id)
        return [] if flight is None else flight.tokens[flight.num_given :].tolist()

    @abstractmethod
    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]: ...

    def connect(self, transport: Transport) -> None:
        raise EngineError(self._refusal())

    def begin_update(self, how: Quiesce, *, policy_id: str = POLICY_ID) -> list[Completion]:
        self.life.require_update(policy_id)
        self._land()
        self.wake()
        ended: list[Completion] = []
        if how is Quiesce.DRAIN:
            with self._computing():
                while self.life.in_flight:
                    self._advance(math.inf)
        elif how is Quiesce.RETRACT:
            self._retract()
        elif how is Quiesce.ABORT:
            ended = self.abort()
        self.life.begin_update()
        return ended

    def apply(self, bucket: Bucket) -> None:
        raise EngineError(self._refusal())

    def commit(self, version: int, *, policy_id: str = POLICY_ID) -> None:
        self.life.require_commit(version, policy_id)
        self._before_commit(version)
        self.life.commit(version)
        self._after_commit()

    def stage(self, bucket: Bucket) -> None:
        raise EngineError(
            f"the {self.life.name} engine takes weights between begin_update() and commit() alone."
        )

    def cancel_update(self) -> None:
        if self.life.is_updating:
            self._cancel_update()

    def sleep(self) -> None:
        if not (self.life.is_asleep or self.life.is_closed):
            self._land()
            self._free_memory()
            self.life.is_asleep = True

    def wake(self) -> None:
        self.life.require_open()
        if self.life.is_asleep:
            self._restore_memory()
            self.life.is_asleep = False

    def health(self) -> str | None:
        return self.life.health()

    @abstractmethod
    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        if not self.life.is_closed:
            self._shut_down()
            self.life.close()

    # Methods that each engine implements.

    @abstractmethod
    def _flight(self, request: Request, *, number: int, now: float) -> F:
        """Create the engine's record of a request."""

    @abstractmethod
    def _start(self, flight: F) -> None:
        """Begin to compute a flight that has tokens left to sample."""

    @abstractmethod
    def _step(self, until: float) -> None:
        """Compute at least one step, and further steps only while there is time."""

    @abstractmethod
    def _drop(self, flight: F) -> None:
        """Release the resources of a flight."""

    @abstractmethod
    def _retract(self) -> None:
        """Release the flights' caches, which are computed again with the next weights."""

    @abstractmethod
    def _free_memory(self) -> None:
        """Free the memory that only sampling needs."""

    @abstractmethod
    def _restore_memory(self) -> None:
        """Undo `_free_memory`."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Free everything, for good."""

    def _require_room(self, flight: F) -> None:
        """Refuse a flight that could never be served. By default there is room for all."""

    def _land(self) -> None:
        """Collect the results of steps that were computed ahead of the host. By default there are
        none.
        """

    def _computing(self) -> AbstractContextManager[object]:
        """Return the context in which steps are computed."""
        return nullcontext()

    def _before_commit(self, version: int) -> None:
        """Discard what old weights computed. May raise an error to refuse the update."""

    def _cancel_update(self) -> None:
        """Hold back in-flight requests until an update is complete."""
        self.life.break_off()

    def _after_commit(self) -> None:
        """Resume the requests in flight."""

    # Methods that all engines share.

    def _require_servable(self, request: Request) -> None:
        require_servable(
            request,
            self.capabilities,
            vocabulary=self.vocabulary,
            can_decode=self.decode is not None,
        )

    def _advance(self, until: float) -> None:
        self._end_expired()
        if self.life.in_flight:
            self._step(until)

    def _finish(self, flight: F, reason: StopReason) -> None:
        """End a flight whose completion the next poll returns."""
        self.life.finished.append(self._end(flight, reason))

    def _end(self, flight: F, reason: StopReason) -> Completion:
        del self.life.in_flight[flight.request.id]
        self._drop(flight)
        return flight.completion(reason)

    def _end_expired(self) -> None:
        now = time.monotonic()
        if now < self._next_expiry:
            return
        flights = list(self.life.in_flight.values())
        for flight in flights:
            if flight.expires is not None and flight.expires <= now:
                self._finish(flight, StopReason.DEADLINE)
        left = (flight.expires for flight in self.life.in_flight.values())
        self._next_expiry = min((at for at in left if at is not None), default=math.inf)

    def _refuse_weights(self) -> NoReturn:
        self.life.problem = (
            f"the weights of version {self.life.version} give log-probs that are not finite, so "
            "that nothing can be sampled from them"
        )
        raise PolicyNotFiniteError(
            f"{self.life.problem}. Did an update go wrong? Go back to a checkpoint, and lower "
            "trainer.lr or trainer.max_grad_norm."
        )

    def _refusal(self) -> str:
        return f"the {self.life.name} engine shares the trainer's weights: it receives none."
