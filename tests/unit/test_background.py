"""An engine that samples while its caller does something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from homeostat.errors import EngineError
from homeostat.rollout.background import Background
from homeostat.rollout.engine import Capabilities, Quiesce, Request, Sampling
from homeostat.types import Completion, Segment, StopReason


class Metronome:
    """An engine that samples one token per poll and request, and says who polled."""

    policy_id = "policy"
    capabilities = Capabilities(
        "metronome", shares_weights=False, batch_invariant=True, quiesce=frozenset(Quiesce),
        max_tokens=None, own_process=True,
    )  # fmt: skip

    def __init__(self) -> None:
        self.version = 0
        self.flights: dict[str, tuple[Request, list[int]]] = {}
        self.users: set[str] = set()
        self.is_stuck = False
        self.problem: EngineError | None = None

    @property
    def policy_version(self) -> int:
        return self.version

    def submit(self, request: Request) -> None:
        self.flights[request.id] = (request, [])

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self.users.add(threading.current_thread().name)
        if self.problem is not None:
            raise self.problem
        if self.is_stuck:
            threading.Event().wait(timeout_s)
            return []
        threading.Event().wait(0.001)
        for _, tokens in self.flights.values():
            tokens.append(self.version)
        done = [
            id
            for id, (request, tokens) in self.flights.items()
            if len(tokens) + sum(len(s.tokens_T) for s in request.begun)
            >= request.sampling.max_new_tokens
        ]
        return [self._end(id, StopReason.LENGTH) for id in done]

    def abort(self, ids: Any = None) -> list[Completion]:
        return [self._end(id, StopReason.ABORTED) for id in list(self.flights)]

    def health(self) -> str | None:
        return None

    def _end(self, id: str, reason: StopReason) -> Completion:
        request, tokens = self.flights.pop(id)
        tokens_T = np.array(tokens, dtype=np.int64)
        own = (
            (Segment(tokens_T, np.zeros(len(tokens), np.float32), self.version),) if tokens else ()
        )
        return Completion(id, request.begun + own, reason)


def request(id: str, length: int) -> Request:
    return Request(id, np.array([1]), Sampling(length), seed=0)


@contextmanager
def background(engine: Metronome, **named: Any) -> Iterator[Background]:
    options = {"stall_s": 30.0, "interrupts": False, **named}
    with closing(Background(engine, **options)) as found:  # type: ignore[arg-type]
        yield found


def test_long_requests_end_under_the_weights_that_they_began_with() -> None:
    engine, found = Metronome(), list[Completion]()
    with background(engine) as sampling:
        sampling.submit([request("short", 2), request("long", 200)], found.append)
        with sampling.quiesced():
            assert [one.request_id for one in found] == ["short", "long"]
            assert engine.flights == {}
            engine.version = 1
    assert set(found[1].policy_versions_T.tolist()) == {0}
    assert engine.users == {"sampling_0"}


def test_what_is_cut_off_continues_in_the_order_of_submission() -> None:
    engine, found = Metronome(), list[Completion]()
    with background(engine, interrupts=True) as sampling:
        sampling.submit([request(str(number), 10**6) for number in range(3)], found.append)
        sampling.wait(lambda: all(tokens for _, tokens in engine.flights.values()))
        with sampling.quiesced():
            assert engine.flights == {}
            engine.version = 1
        assert list(engine.flights) == ["0", "1", "2"]
        begun = sampling.begun("0")
        assert begun is not None
        assert {segment.policy_version for segment in begun.begun} == {0}
    assert found == []


def test_a_whole_request_is_not_cut_off() -> None:
    engine, found = Metronome(), list[Completion]()
    with background(engine, interrupts=True) as sampling:
        sampling.submit([request("cut", 10**6)], found.append)
        sampling.submit([request("whole", 100)], found.append, whole=True)
        with sampling.quiesced():
            engine.version = 1
    assert [one.request_id for one in found] == ["whole"]
    assert set(found[0].policy_versions_T.tolist()) == {0}


def test_what_goes_wrong_in_the_thread_is_raised_where_somebody_waits() -> None:
    engine = Metronome()
    engine.problem = EngineError("it is broken")
    with background(engine) as sampling:
        sampling.submit([request("0", 5)], lambda completion: None)
        with pytest.raises(EngineError, match="it is broken"):
            sampling.wait(lambda: False)


def test_an_engine_that_finishes_nothing_is_named() -> None:
    engine = Metronome()
    engine.is_stuck = True
    with background(engine, stall_s=0.3) as sampling:
        sampling.submit([request("0", 5)], lambda completion: None)
        with pytest.raises(EngineError, match=r"metronome engine finished none of 1 .*stall_s"):
            sampling.wait(lambda: False)


def test_an_engine_in_this_process_computes_while_its_caller_waits() -> None:
    engine, found = Metronome(), list[Completion]()
    engine.capabilities = replace(engine.capabilities, own_process=False)
    with background(engine) as sampling:
        sampling.submit([request("0", 5)], found.append)
        assert engine.users == set()
        sampling.wait(lambda: bool(found))
    assert engine.users == {threading.current_thread().name}
