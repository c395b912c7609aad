"""vLLM where it belongs: in a process of its own, driven by RemoteEngine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.engines import (
    HAS_VLLM,
    MAX_TOKENS,
    VOCABULARY,
    Model,
    assert_close,
    change,
    finish,
    load,
    prompts,
    requests,
    run,
    trainer_logp,
)

from homeostat.arrays import FloatArray
from homeostat.config.cluster import InProcessCluster
from homeostat.config.sync import AnyTransport, CollectiveConfig, DiskConfig, SharedMemoryConfig
from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineDiedError, EngineError
from homeostat.models.lora import merged_state
from homeostat.rollout.engine import Quiesce, Request, Sampling
from homeostat.rollout.registry import ENGINES
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.served import Served
from homeostat.sync.bucket import Bucket, Packer
from homeostat.sync.publish import Publisher
from homeostat.sync.transports import open_transport
from homeostat.types import TokenRow
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make test-vllm)"),
]


@dataclass(frozen=True)
class Source:
    """The trainer's side of a publication."""

    model: Model

    def weight_buckets(self, packer: Packer) -> Iterator[Bucket]:
        return packer.pack(merged_state(self.model.ours))

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        raise NotImplementedError("nothing is probed here")


@pytest.fixture(scope="module")
def model() -> Model:
    return load("qwen3")


@pytest.fixture(scope="module")
def engine(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    config = VllmEngineConfig(type="vllm", enforce_eager=True, max_concurrency=8)
    kwargs = {
        "folder": model.folder,
        "config": config,
        "served": Served("qwen3", VOCABULARY, "float32"),
        "max_tokens": MAX_TOKENS,
        "policy_version": 2,
    }
    spec = GroupSpec(
        factory="homeostat.rollout.server:serve_engine",
        kwargs={"factory": ENGINES["vllm"].factory, "kwargs": kwargs},
        kind="engine",
        name="engine",
        log_file=tmp_path_factory.mktemp("engine") / "engine.log",
        start_timeout_s=240.0,
    )
    remote = RemoteEngine(
        lambda: open_group(InProcessCluster(), spec),
        vocabulary=VOCABULARY,
        can_decode=False,
        timeout_s=120.0,
        update_timeout_s=120.0,
    )
    yield remote
    remote.close()


@pytest.mark.parametrize(
    "way", [SharedMemoryConfig(), DiskConfig(type="disk"), CollectiveConfig(type="collective")]
)
def test_weights_reach_it_by_every_way(
    engine: RemoteEngine, model: Model, tmp_path: Path, way: AnyTransport
) -> None:
    config = way.model_copy(update={"bucket_bytes": 1 << 14})
    version = engine.policy_version + 1
    assert version >= 3
    change(model)
    transport = open_transport(config, folder=tmp_path, device=torch.device("cpu"), timeout_s=120.0)
    engine.connect(transport)
    publisher = Publisher(transport, probe=None)
    manifest = publisher.publish(
        Source(model), engine, version=version, quiesce=Quiesce.DRAIN, on_ended=lambda ended: None
    )
    publisher.close()
    assert engine.received_checksum == manifest.checksum
    (request,) = requests(prompts((20,)), Sampling(20))
    (completion,) = run(engine, [request])
    assert [segment.policy_version for segment in completion.segments] == [version]
    assert_close(
        completion.engine_logp_T, trainer_logp(model, request.tokens_T, completion.tokens_T, 1.0)
    )


def test_what_it_refuses_arrives_as_it_was_said(engine: RemoteEngine) -> None:
    engine.submit(Request("cold", np.array([1, 2]), Sampling(2, temperature=0.005), seed=0))
    with pytest.raises(EngineError, match=r"between 0 and 0\.01"):
        engine.poll(timeout_s=60)
    assert engine.health() is None


def test_its_death_is_noticed_and_named(engine: RemoteEngine) -> None:
    import psutil

    # The worker is its guardian's child.
    (worker,) = (
        worker
        for guardian in psutil.Process().children()
        for worker in guardian.children()
        if "homeostat.workers.child" in worker.cmdline()
    )
    wanted = requests(prompts((20,)), Sampling(100), samples=4)
    for request in wanted:
        engine.submit(request)
    engine.poll(timeout_s=0.0)
    worker.kill()
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        finish(engine, wanted)
    assert "SIGKILL" in (engine.health() or "")
