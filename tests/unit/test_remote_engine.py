"""An engine behind a worker: what is late, what is refused, and weights that come in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, random_model, save
from tests.support.own_process import OwnProcess
from torch import Tensor

from homeostat.config.cluster import LOOPBACK
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError, SyncError
from homeostat.models.build import load_model
from homeostat.models.lora import lora_modules, merged_state
from homeostat.rollout import remote
from homeostat.rollout.engine import Quiesce, Request, Sampling
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.native.scoring import score_rows
from homeostat.rollout.remote import RemoteEngine
from homeostat.sync.bucket import entries_checksum
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.types import TokenRow
from homeostat.workers.in_process import InProcessGroup

CPU = torch.device("cpu")
VOCABULARY = 97
MAX_TOKENS = 64
TRANSPORT = SharedMemoryTransport("homeostat-unit", 1 << 14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model({**FAMILIES["qwen3"], "vocab_size": VOCABULARY})
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def process() -> Iterator[OwnProcess]:
    own = OwnProcess()
    yield own
    own.close()


def kwargs_of(folder: Path, **config: Any) -> dict[str, Any]:
    return {
        "model": ModelConfig(path=str(folder)),
        "engine": NativeEngineConfig(own_process=True, **config),
        "device": CPU,
        "dtype": torch.float32,
        "threads": 1,
        "seed": 0,
        "max_tokens": MAX_TOKENS,
        "chunk_bytes": 1 << 16,
    }


def in_process(folder: Path, **config: Any) -> RemoteEngine:
    """The same calls and the same worker's object, without the process."""
    factory = "homeostat.rollout.native.host:build_engine"
    served = {"factory": factory, "kwargs": kwargs_of(folder, **config)}
    engine = RemoteEngine(
        lambda: InProcessGroup(
            "homeostat.rollout.server:serve_engine", served, name="engine", host=LOOPBACK
        ),
        vocabulary=VOCABULARY,
        can_decode=True,
        timeout_s=60,
        update_timeout_s=60,
    )
    engine.connect(TRANSPORT)
    return engine


def request(name: str, *, new_tokens: int = 8) -> Request:
    return Request(name, np.array([1, 2, 3]), Sampling(new_tokens), seed=0)


def policy(folder: Path, adapter: LoraConfig | None = None) -> Any:
    loaded = load_model(
        ModelConfig(path=str(folder)), adapter, dtype=torch.float32, device=CPU, seed=0,
        gradient_checkpointing=False,
    )  # fmt: skip
    return loaded.module


def send(engine: RemoteEngine, weights: list[tuple[str, Tensor]]) -> str:
    """What was sent, as the sender sums it up."""
    packer = TRANSPORT.packer()
    entries = []
    try:
        for bucket in packer.pack(weights):
            engine.apply(bucket)
            entries += bucket.entries
    finally:
        packer.close()
    return entries_checksum(entries)


def test_a_poll_that_is_late_is_picked_up_by_the_next(
    process: OwnProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0.0)
    engine = process.engine(kwargs_of(folder), vocabulary=VOCABULARY)
    engine.submit(request("a", new_tokens=60))
    empty = 0
    while not (found := engine.poll(timeout_s=0.0)):
        empty += 1
    assert empty > 0
    assert len(found[0]) == 60
    # Other verbs wait for it, and lose nothing of it.
    engine.submit(request("b", new_tokens=60))
    engine.poll(timeout_s=0.0)
    (partial,) = engine.abort()
    assert partial.request_id == "b"
    assert engine.poll(timeout_s=0.0) == []


def test_what_the_worker_refuses_is_told_and_the_others_are_served(folder: Path) -> None:
    """Only the worker knows how much memory there is."""
    engine = in_process(folder, memory_share=16 * 1024 / free_bytes(CPU))
    for name, new_tokens in (("short", 4), ("long", 61)):
        engine.submit(request(name, new_tokens=new_tokens))
    with pytest.raises(EngineError, match=r"'long' cannot be served.*engine\.memory_share"):
        engine.poll(timeout_s=60)
    (found,) = engine.poll(timeout_s=60)
    assert (found.request_id, len(found)) == ("short", 4)
    assert engine.poll(timeout_s=60) == []


def test_an_adapter_comes_merged_in(folder: Path) -> None:
    model = policy(folder, LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, module in lora_modules(model):
            module.lora_B.weight.normal_(0, 0.1, generator=generator)
    engine = in_process(folder)
    rng = np.random.default_rng(0)
    rows = [TokenRow(0, rng.integers(0, VOCABULARY, 30), np.ones(30, dtype=np.float32))]
    before = engine.score(rows, temperature=1.0)[0]
    engine.begin_update(Quiesce.DRAIN)
    sent = send(engine, list(merged_state(model)))
    engine.commit(4)
    assert (engine.policy_version, engine.received_checksum) == (4, sent)
    with torch.no_grad():
        wanted = score_rows(
            model, rows, temperature=1.0, max_tokens=64, chunk_bytes=1 << 16, device=CPU
        )[0]
    found = engine.score(rows, temperature=1.0)[0]
    assert np.abs(found - wanted).max() < 2e-5 * (1 + np.abs(wanted).max())
    assert np.abs(found - before).max() > 1e-2


def first_missing(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return weights[1:]


def first_twice(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [*weights, weights[0]]


def one_unknown(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [*weights, ("model.stranger.weight", torch.zeros(3))]


def one_misshapen(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(weights[0][0], weights[0][1][:-1].clone()), *weights[1:]]


def one_coarser(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(weights[0][0], weights[0][1].bfloat16()), *weights[1:]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (first_missing, "1 of .* tensors did not arrive"),
        (first_twice, "1 of .* tensors arrived more than once"),
        (one_unknown, "has no 'model.stranger.weight'"),
        (one_misshapen, "of another model or precision"),
        (one_coarser, "of another model or precision"),
    ],
)
def test_weights_that_are_not_the_models_are_not_served(
    folder: Path, wrong: Any, words: str
) -> None:
    engine = in_process(folder)
    weights = list(merged_state(policy(folder)))
    engine.begin_update(Quiesce.DRAIN)

    def publish() -> None:
        send(engine, wrong(weights))
        engine.commit(1)

    with pytest.raises(SyncError, match=words):
        publish()
    assert engine.policy_version == 0
    with pytest.raises(EngineError, match="begin_update"):
        engine.poll(timeout_s=1)


def test_weights_need_a_way_and_an_open_door(folder: Path) -> None:
    weights = list(merged_state(policy(folder)))
    with pytest.raises(EngineError, match="without begin_update"):
        send(in_process(folder), weights)
