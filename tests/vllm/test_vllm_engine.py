"""What the contract does not ask of every engine: vLLM's start, its keys, its updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.engines import (
    BUCKET_BYTES,
    HAS_VLLM,
    MAX_TOKENS,
    VLLM,
    VOCABULARY,
    Model,
    assert_close,
    change,
    load,
    prompts,
    publish,
    requests,
    run,
    shared_model,
    tokens_of,
    trainer_logp,
)
from tests.parity.tiny_models import edit_config

from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineError, SyncError
from homeostat.models.lora import merged_state
from homeostat.rollout.engine import Quiesce, Request, Sampling
from homeostat.rollout.vllm.engine import Served, VllmEngine
from homeostat.rollout.vllm.environment import prepare_environment
from homeostat.sync.bucket import Transport, entries_checksum
from homeostat.sync.disk import DiskTransport
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.types import TokenRow

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make test-vllm)"),
]
SERVED = Served("qwen3", VOCABULARY, "float32")


@pytest.fixture(scope="module", autouse=True)
def close_what_was_kept() -> Iterator[None]:
    yield
    VLLM.close()


def make(folder: Path, *, max_tokens: int = MAX_TOKENS, **changes: Any) -> VllmEngine:
    """A further engine, which leaves none of the kept ones usable: they share the process."""
    VLLM.close()
    served = changes.pop("served", SERVED)
    config = VllmEngineConfig(type="vllm", **{"enforce_eager": True, **changes})
    prepare_environment(config)
    return VllmEngine(folder, config, served=served, max_tokens=max_tokens, decode=None)


def reference_logp(model: Model, tokens_T: np.ndarray) -> np.ndarray:
    """By transformers, of all but the first token."""
    with torch.no_grad():
        logits_TV = model.theirs(torch.from_numpy(tokens_T)[None]).logits[0].double()
    logp_TV = logits_TV.log_softmax(-1)[:-1]
    return logp_TV.gather(1, torch.from_numpy(tokens_T[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "family",
    [
        "llama_tied",
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "llama_bias", "qwen2")),
    ],
)
def test_weights_that_came_by_update_are_served(family: str) -> None:
    VLLM(shared_model(family))
    other = load(family, seed=7)
    engine = VLLM(other)
    (request,) = requests(prompts((20,)), Sampling(30))
    (completion,) = run(engine, [request])
    tokens_T = np.concatenate([request.tokens_T, completion.tokens_T])
    assert_close(completion.engine_logp_T, reference_logp(other, tokens_T)[19:])
    row = TokenRow(0, tokens_T, np.ones(len(tokens_T), dtype=np.float32))
    (scored_T,) = engine.score([row], temperature=1.0)
    assert_close(scored_T, reference_logp(other, tokens_T))


@pytest.mark.parametrize(
    "bucket_bytes",
    [1 << 14, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 1 << 24))],
)
@pytest.mark.parametrize("way", ["shared_memory", "disk"])
def test_every_way_brings_the_same_weights(tmp_path: Path, way: str, bucket_bytes: int) -> None:
    model = load("qwen3")
    engine = VLLM(model)
    change(model)
    transport: Transport = SharedMemoryTransport("homeostat-contract", bucket_bytes)
    if way == "disk":
        transport = DiskTransport(tmp_path, "homeostat-contract", bucket_bytes)
    engine.connect(transport)
    packer = transport.packer()
    engine.begin_update(Quiesce.DRAIN)
    entries = []
    for bucket in packer.pack(merged_state(model.ours)):
        engine.apply(bucket)
        entries += bucket.entries
    packer.close()
    engine.commit(engine.policy_version)
    assert engine.received_checksum == entries_checksum(entries)
    wanted = requests(prompts((20,)), Sampling(20))
    (completion,) = run(engine, wanted)
    engine.connect(SharedMemoryTransport("homeostat-contract", BUCKET_BYTES))
    assert_close(
        completion.engine_logp_T,
        trainer_logp(model, wanted[0].tokens_T, completion.tokens_T, 1.0),
    )


def test_an_update_that_breaks_off_is_never_sampled_with() -> None:
    model = load("qwen3")
    wanted = requests(prompts((12, 5)), Sampling(10, temperature=0.0), samples=2)
    engine = VLLM(model)
    whole = run(engine, wanted)
    packer = SharedMemoryTransport("homeostat-contract", BUCKET_BYTES).packer()
    engine.begin_update(Quiesce.DRAIN)
    buckets = packer.pack(merged_state(model.ours))
    engine.apply(next(buckets))
    bucket = next(buckets)
    wrong = replace(bucket.entries[0], checksum=bucket.entries[0].checksum ^ 1)
    with pytest.raises(SyncError, match=wrong.name):
        engine.apply(replace(bucket, entries=(wrong, *bucket.entries[1:])))
    packer.close()
    assert "broke off" in (engine.health() or "")
    for request in wanted:
        engine.submit(request)
    with pytest.raises(EngineError, match="broke off"):
        engine.poll(timeout_s=60)
    # Without new weights an update mends nothing.
    engine.begin_update(Quiesce.RETRACT)
    engine.commit(engine.policy_version)
    assert "broke off" in (engine.health() or "")
    engine.begin_update(Quiesce.RETRACT)
    publish(engine, model)
    engine.commit(engine.policy_version)
    assert engine.health() is None
    found = sorted(engine.poll(timeout_s=60), key=lambda completion: completion.request_id)
    assert tokens_of(found) == tokens_of(whole)


def test_an_update_that_leaves_parameters_out_is_refused() -> None:
    model = load("qwen3")
    engine = VLLM(model)
    packer = SharedMemoryTransport("homeostat-contract", BUCKET_BYTES).packer()
    weights = [(n, t) for n, t in merged_state(model.ours) if n != "model.norm.weight"]
    engine.begin_update(Quiesce.DRAIN)
    for bucket in packer.pack(weights):
        engine.apply(bucket)
    packer.close()
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        engine.commit(engine.policy_version + 1)
    assert engine.health() is not None
    assert VLLM(model).health() is None


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    engine = VLLM(shared_model())
    with pytest.raises(EngineError, match=r"between 0 and 0\.01"):
        engine.submit(Request("a", np.array([1, 2]), Sampling(2, temperature=0.005), seed=0))


def test_a_long_prompt_is_shared_and_its_cache_is_found_again() -> None:
    engine = VLLM(shared_model())
    wanted = requests(prompts((140,)), Sampling(4), samples=4)
    before = engine.stats()
    run(engine, wanted)
    after = engine.stats()
    assert after.prompt_tokens_shared - before.prompt_tokens_shared == 3 * 128
    assert after.prompt_tokens - before.prompt_tokens == 140 + 3 * 12


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (replace(SERVED, vocabulary=98), "a vocabulary of 97"),
        (replace(SERVED, model_type="llama"), "a model of type qwen3"),
    ],
)
def test_a_model_that_is_not_the_trainers_is_refused(served: Served, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        make(shared_model().folder, served=served)


def test_what_vllm_refuses_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="vLLM does not start"):
        make(shared_model().folder, max_tokens=100_000)
    with pytest.raises(EngineError, match="vLLM does not start"):
        make(shared_model().folder, options={"block_size": "many"})


def test_keys_reach_vllm_and_a_row_may_be_as_long_as_the_model_allows() -> None:
    """The longest row has no place after it, which vLLM asks for; and a checkpoint's own sampling
    defaults change nothing."""
    model = load("qwen3")
    edit_config(model.folder, max_position_embeddings=MAX_TOKENS)
    (model.folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 1, "temperature": 0.1, "eos_token_id": 3})
    )
    engine = make(
        model.folder,
        max_concurrency=5,
        max_batched_tokens=200,
        memory_share=0.01,
        dtype="float32",
        served=replace(SERVED, dtype="bfloat16"),
        options={"block_size": 32},
    )
    config = engine.core._llm.vllm_config
    assert config.scheduler_config.max_num_seqs == 5
    assert config.scheduler_config.max_num_batched_tokens == 200
    assert config.cache_config.block_size == 32
    assert config.model_config.dtype == torch.float32
    assert config.model_config.enforce_eager
    row_T = prompts((MAX_TOKENS,))[0]
    row = TokenRow(0, row_T, np.ones(MAX_TOKENS, dtype=np.float32))
    (scored_T,) = engine.score([row], temperature=1.0)
    assert_close(scored_T, reference_logp(model, row_T))
    (request,) = requests([row_T[:100]], Sampling(60))
    (completion,) = run(engine, [request])
    assert len(completion) == 60
    assert len(set(completion.tokens_T.tolist())) > 20
    engine.close()


def test_nothing_listens_but_on_the_loopback_interface() -> None:
    import psutil

    VLLM(shared_model())
    listening = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert listening
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1"}
