"""A router over engines: who gets what, and what becomes of it when an engine dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.engines import CHUNK_BYTES, CPU, MAX_TOKENS, VOCABULARY, Model, load, native

from homeostat.arrays import FloatArray
from homeostat.config.cluster import LOOPBACK, InProcessCluster
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineDiedError, NotServedError, SyncError
from homeostat.models.decoder import Decoder
from homeostat.models.lora import merged_state
from homeostat.rollout.engine import Engine, Quiesce, Request, Sampling, generate
from homeostat.rollout.mirror import MirrorEngine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router, common_capabilities
from homeostat.rollout.server import SERVER
from homeostat.sync.bucket import Bucket, Manifest, Packer
from homeostat.sync.publish import Publisher
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.types import Completion, TokenRow
from homeostat.workers.in_process import InProcessGroup
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec


def served_by(model: Model) -> dict[str, Any]:
    """What a worker is asked to serve: a native engine with its own copy of the weights."""
    kwargs = {
        "model": ModelConfig(path=str(model.folder)),
        "engine": NativeEngineConfig(own_process=True),
        "device": CPU,
        "dtype": torch.float32,
        "threads": 1,
        "seed": 0,
        "max_tokens": MAX_TOKENS,
        "chunk_bytes": CHUNK_BYTES,
    }
    return {"factory": "homeostat.rollout.native.host:build_engine", "kwargs": kwargs}


class Weights:
    """The trainer's half of a publication that is not probed."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def weight_buckets(self, packer: Packer) -> Iterator[Bucket]:
        return packer.pack(merged_state(self.model.ours))

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        raise AssertionError("nothing is probed")


class Workshop:
    """A router over an engine in this process and one in another, and what was lost of them."""

    def __init__(self, model: Model, folder: Path) -> None:
        log_file = folder / "helper.log"
        spec = GroupSpec(
            factory=SERVER, kwargs=served_by(model), kind="engine", name="helper", log_file=log_file
        )
        self.helper = RemoteEngine(
            lambda: open_group(InProcessCluster(), spec),
            vocabulary=VOCABULARY,
            can_decode=True,
            timeout_s=60,
            update_timeout_s=60,
        )
        self.model = model
        self.lost: list[EngineDiedError] = []
        self.transport = SharedMemoryTransport(f"homeostat-router-{os.getpid()}", 1 << 16)
        self.helper.connect(self.transport)
        self.own = native(model)
        mirror = MirrorEngine(self.helper, version=0, send_weights=self.send)
        self.engine = Router([self.own, mirror], on_loss=lambda _, error: self.lost.append(error))

    def send(self, helper: RemoteEngine, version: int, how: Quiesce) -> None:
        helper.begin_update(how)
        packer = self.transport.packer()
        for bucket in packer.pack(merged_state(self.model.ours)):
            helper.apply(bucket)
        packer.close()
        helper.commit(version)

    def kill_helper(self) -> None:
        self._signal_helper(signal.SIGKILL)

    def freeze_helper(self) -> None:
        """Keep it from answering: one that has answered everything before it dies is not missed."""
        self._signal_helper(signal.SIGSTOP)

    def _signal_helper(self, number: signal.Signals) -> None:
        """Send a signal to the launcher's children, which compute, and to the launcher."""
        (launcher,) = self.helper._group._started.launchers
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
        for pid in [*map(int, children.split()), launcher.pid]:
            os.kill(pid, number)


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(load("qwen3"), tmp_path)
    yield made
    made.engine.close()


def wanted(*, groups: int = 4) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=24)
    prompts = [rng.integers(0, VOCABULARY, 9) for _ in range(groups)]
    return [
        Request(f"{group}/{sample}", tokens_T, sampling, seed=1, session_key=f"{group}")
        for group, tokens_T in enumerate(prompts)
        for sample in range(4)
    ]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens_T.tolist() for completion in completions]


def results_of(engine: Engine, requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
    found = generate(engine, requests, timeout_s=60)
    return [(one.tokens_T.tolist(), one.engine_logp_T.tolist()) for one in found]


def invariant(model: Model) -> Model:
    ours = Decoder(model.ours.config, kernel="sdpa", numerics="invariant")
    ours.load_state_dict(model.ours.state_dict())
    return replace(model, ours=ours)


def test_the_number_of_engines_changes_no_bit() -> None:
    model = invariant(load("qwen3"))
    alone = results_of(native(model), wanted())
    for num_engines in (1, 2, 3):
        engines = [native(model) for _ in range(num_engines)]
        assert results_of(Router(engines), wanted()) == alone
        # All of them have worked.
        assert min(engine.stats().new_tokens for engine in engines) > 0


def test_requests_are_dealt_by_the_order_of_submission_and_sessions_stay() -> None:
    model = load("qwen3")
    engines = [native(model) for _ in range(3)]
    router = Router(engines)
    requests = wanted(groups=5)
    for request in requests:
        router.submit(request)
    # To each in turn the one that was dealt the fewest: sessions 3 and 4 begin with all at 4.
    places = [[id for id in engine.life.in_flight if id.endswith("/0")] for engine in engines]
    assert places == [["0/0", "3/0"], ["1/0", "4/0"], ["2/0"]]
    found: dict[str, Completion] = {}
    while len(found) < len(requests):
        found |= {one.request_id: one for one in router.poll(timeout_s=60)}
    # A next turn, when nothing is in flight, goes where its session was.
    router.submit(replace(requests[8], id="next turn"))
    assert list(engines[2].life.in_flight) == ["next turn"]
    router.abort()
    # New weights void the caches: the session is dealt anew.
    router.begin_update(Quiesce.DRAIN)
    router.commit(1)
    router.submit(replace(requests[8], id="after an update"))
    assert list(engines[0].life.in_flight) == ["after an update"]


def test_a_router_can_do_what_all_of_its_engines_can() -> None:
    able = native(load("qwen3")).capabilities
    less = replace(
        able,
        batch_invariant=True,
        quiesce=frozenset({Quiesce.DRAIN}),
        max_tokens=100,
        resumes_exactly=False,
        score_temperatures="one",
        cut_logp=False,
        own_process=True,
        num_receivers=2,
    )
    assert common_capabilities([able]) == able
    common = replace(less, batch_invariant=False, own_process=False, num_receivers=3)
    assert common_capabilities([able, less]) == common


def test_sessions_stay_whole_and_both_have_as_much(workshop: Workshop) -> None:
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    assert tokens_of(generate(workshop.engine, wanted(), timeout_s=60)) == alone
    own, helper = workshop.own.stats(), workshop.helper.stats()
    # Of each of four prompts 9 tokens, once; the rest of its group shares them.
    assert own.prompt_tokens == helper.prompt_tokens == 2 * 9
    assert workshop.engine.stats().new_tokens == own.new_tokens + helper.new_tokens


def test_a_helper_samples_with_the_weights_of_the_commit(workshop: Workshop) -> None:
    workshop.engine.begin_update(Quiesce.DRAIN)
    with torch.no_grad():
        for parameter in workshop.model.ours.parameters():
            parameter.mul_(1.2)
    workshop.engine.commit(1)
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    found = generate(workshop.engine, wanted(), timeout_s=60)
    assert tokens_of(found) == alone
    assert {segment.policy_version for one in found for segment in one.segments} == {1}


@pytest.mark.parametrize("when", ["in flight", "at a commit", "asleep"])
def test_a_helper_that_dies_loses_nothing(workshop: Workshop, when: str) -> None:
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    if when == "in flight":
        workshop.freeze_helper()
        for request in wanted():
            workshop.engine.submit(request)
        workshop.kill_helper()
        found: dict[str, Completion] = {}
        while len(found) < len(wanted()):
            found |= {one.request_id: one for one in workshop.engine.poll(timeout_s=60)}
        assert tokens_of([found[request.id] for request in wanted()]) == alone
    else:
        workshop.kill_helper()
        if when == "at a commit":
            workshop.engine.begin_update(Quiesce.DRAIN)
            workshop.engine.commit(1)
        else:
            workshop.engine.sleep()
        assert tokens_of(generate(workshop.engine, wanted(), timeout_s=60)) == alone
    assert len(workshop.lost) == 1
    assert workshop.engine.engines == [workshop.own]


def test_an_engine_that_is_restarted_stays_in_the_router(workshop: Workshop) -> None:
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    restarts: list[EngineDiedError] = []

    def restart(error: EngineDiedError) -> None:
        restarts.append(error)

        def send() -> None:
            workshop.helper.connect(workshop.transport)
            workshop.send(workshop.helper, 0, Quiesce.DRAIN)

        workshop.helper.restart(send)

    workshop.helper.on_death = restart
    workshop.freeze_helper()
    for request in wanted():
        workshop.engine.submit(request)
    workshop.engine.poll(timeout_s=0)
    workshop.kill_helper()
    found: dict[str, Completion] = {}
    while len(found) < len(wanted()):
        found |= {one.request_id: one for one in workshop.engine.poll(timeout_s=60)}
    assert tokens_of([found[request.id] for request in wanted()]) == alone
    assert len(restarts) == 1
    assert workshop.lost == []
    assert len(workshop.engine.engines) == 2


@pytest.fixture
def two() -> Iterator[tuple[Model, Router, Publisher]]:
    """Two engines with weights of their own as one, and what sends them the model's, which are new.
    Nothing is probed."""
    model = load("qwen3")
    engines = [
        RemoteEngine(
            lambda: InProcessGroup(SERVER, served_by(model), name="engine", host=LOOPBACK),
            vocabulary=VOCABULARY, can_decode=True, timeout_s=60, update_timeout_s=60,
        )
        for _ in range(2)
    ]  # fmt: skip
    router = Router(engines)
    with torch.no_grad():
        for parameter in model.ours.parameters():
            parameter.mul_(1.2)
    transport = SharedMemoryTransport(f"homeostat-router-all-{os.getpid()}", 1 << 16)
    router.connect(transport)
    publisher = Publisher(transport, probe=None)
    yield model, router, publisher
    publisher.close()
    router.close()


def publish(publisher: Publisher, model: Model, router: Router) -> Manifest:
    return publisher.publish(
        Weights(model), router, version=7, quiesce=Quiesce.DRAIN, on_ended=list
    )


def test_weights_are_sent_to_all_engines_of_a_router(two: tuple[Model, Router, Publisher]) -> None:
    model, router, publisher = two
    assert router.capabilities.num_receivers == 2
    manifest = publish(publisher, model, router)
    assert router.received_checksum == manifest.checksum
    assert [engine.policy_version for engine in router.engines] == [7, 7]
    alone = tokens_of(generate(native(model), wanted(), timeout_s=60))
    assert tokens_of(generate(router, wanted(), timeout_s=60)) == alone


def test_an_engine_that_misses_staged_weights_is_found(
    two: tuple[Model, Router, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would sample with the weights before, under the number of the new ones."""
    model, router, publisher = two
    monkeypatch.setattr(router.engines[1], "stage", lambda bucket: None)
    publisher.stage(Weights(model), router, version=7)
    with pytest.raises(NotServedError, match="does not serve the weights"):
        publish(publisher, model, router)


def test_weights_that_one_engine_did_not_take_in_are_not_staged(
    two: tuple[Model, Router, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, router, publisher = two

    def fail(bucket: Bucket) -> None:
        raise EngineDiedError("it seemed to be gone")

    monkeypatch.setattr(router.engines[1], "stage", fail)
    with pytest.raises(SyncError, match="seemed to be gone"):
        publisher.stage(Weights(model), router, version=7)
    assert publish(publisher, model, router).staged_seconds is None


def test_a_request_is_not_handed_to_an_engine_that_a_thread_is_at(
    two: tuple[Model, Router, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is being sent meanwhile, and the request could be lost."""
    _, router, _ = two
    dies, lives = router.engines
    poll, submit, at_it = lives.poll, lives.submit, threading.Event()

    def gone(*, timeout_s: float) -> list[Completion]:
        at_it.wait(20)
        raise EngineDiedError("it is gone")

    def slow(*, timeout_s: float) -> list[Completion]:
        at_it.set()
        time.sleep(0.2)
        try:
            return poll(timeout_s=timeout_s)
        finally:
            at_it.clear()

    def watched(request: Request) -> None:
        assert not at_it.is_set(), "a thread is at it"
        submit(request)

    for request in wanted():
        router.submit(request)
    monkeypatch.setattr(dies, "poll", gone)
    monkeypatch.setattr(lives, "poll", slow)
    monkeypatch.setattr(lives, "submit", watched)
    found: set[str] = set()
    while len(found) < len(wanted()):
        found |= {one.request_id for one in router.poll(timeout_s=60)}
    assert router.engines == [lives]
