"""Models with experts behind every front of the native engine: weights by hub names, and routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.engines import (
    BUCKET_BYTES,
    CPU,
    MAX_TOKENS,
    VOCABULARY,
    Model,
    assert_close,
    change,
    native,
    native_in_its_own_process,
    native_with_a_helper,
    prompts,
    requests,
    run,
    trainer_logp,
)
from tests.parity.tiny_models import random_model, save
from tests.support.moe import MOE_FAMILIES

from homeostat.columns import dense
from homeostat.config.model import ModelConfig
from homeostat.errors import EngineError, NotServedError, SyncError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.models.float64 import reference_logprobs
from homeostat.models.hub_names import stacked_tensors
from homeostat.models.lora import merged_state
from homeostat.models.routing import Routing
from homeostat.ops.attention import PackedLayout
from homeostat.rollout.engine import Quiesce, Request, Sampling
from homeostat.sync.bucket import Manifest, entries_checksum
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.sync.verify import Probe, require_received, require_served
from homeostat.types import POLICY_ID, Completion

FAMILIES = [
    "qwen3_moe",
    "dots1",
    pytest.param("mixtral", marks=pytest.mark.slow),
]


def load(family: str, folder: Path) -> Model:
    theirs = random_model({**MOE_FAMILIES[family], "vocab_size": VOCABULARY}, seed=3)
    loaded = load_model(
        ModelConfig(path=str(save(theirs, folder))),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    )
    assert isinstance(loaded.module, Decoder)
    return Model(theirs, loaded.module, family, folder)


def asking(lengths: tuple[int, ...], new: int, samples: int) -> list[Request]:
    wanted = requests(prompts(lengths), Sampling(new), samples=samples)
    return [replace(request, routed_experts=True, routed_weights=True) for request in wanted]


def check(model: Model, wanted: list[Request], found: list[Completion]) -> None:
    """Log-probs and experts are the trainer's."""
    for request, completion in zip(wanted, found, strict=True):
        prompt_T, answer_T = request.tokens_T, completion.tokens_T
        logp_T = trainer_logp(model, prompt_T, answer_T, 1.0)
        assert_close(completion.engine_logp_T, logp_T)
        tokens_N = torch.from_numpy(np.concatenate([prompt_T, answer_T]))
        routing, layout = Routing(records=True), PackedLayout.of([len(tokens_N)], CPU)
        with torch.no_grad():
            model.ours.hidden(tokens_N, torch.arange(len(tokens_N)), layout, routing=routing)
        columns = (completion.prompt_columns, completion.columns)
        routes_NLK = np.concatenate([dense(one["routed_experts"]) for one in columns])
        np.testing.assert_array_equal(routes_NLK[:-1], routing.recorded().numpy()[:-1])
        weights_NLK = np.concatenate([dense(one["routed_weights"]) for one in columns])
        own_NLK = routing.recorded_weights().numpy()
        np.testing.assert_allclose(weights_NLK[:-1], own_NLK[:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_come_through_router_mirror_and_process(family: str, tmp_path: Path) -> None:
    model, wanted = load(family, tmp_path), asking((9, 21, 4), 8, 2)
    engine = native_with_a_helper(model)
    assert engine.capabilities.routed_experts
    assert engine.capabilities.routed_weights
    check(model, wanted, run(engine, wanted))
    engine.begin_update(Quiesce.DRAIN)
    change(model)
    engine.commit(1)
    check(model, wanted, run(engine, wanted))
    engine.close()


def test_a_request_resumes_in_another_process(tmp_path: Path) -> None:
    model, (request,) = load("qwen3_moe", tmp_path), asking((9,), 20, 1)
    here = native(model)
    (whole,) = run(here, [request])
    here.submit(request)
    for _ in range(9):
        here.poll(timeout_s=0.0)
    (partial,) = here.abort()
    assert 1 < len(partial) < 20
    there = native_in_its_own_process(model)
    again = replace(request, begun=partial.segments, prompt_columns=partial.prompt_columns)
    (resumed,) = run(there, [again])
    assert resumed.tokens_T.tolist() == whole.tokens_T.tolist()
    check(model, [request], [resumed])
    with pytest.raises(EngineError, match="are unknown"):
        there.submit(replace(again, begun=(replace(partial.segments[0], columns={}),)))
    there.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_received_by_name_and_proven_to_be_served(
    family: str, tmp_path: Path
) -> None:
    model = load(family, tmp_path)
    engine = native_in_its_own_process(model)
    change(model)
    probe = Probe(VOCABULARY, model.ours.config.num_layers, torch.float32)
    trainer_logps = native(model).score(probe.rows(), temperature=1.0)

    def send(weights: list[tuple[str, torch.Tensor]], version: int) -> Manifest:
        packer = SharedMemoryTransport("homeostat-contract", BUCKET_BYTES).packer()
        engine.begin_update(Quiesce.DRAIN)
        entries = []
        for bucket in packer.pack(weights):
            engine.apply(bucket)
            entries += bucket.entries
        packer.close()
        engine.commit(version)
        size = sum(tensor.nbytes for _, tensor in weights)
        checksum = entries_checksum(entries)
        return Manifest(POLICY_ID, version, 0, "test", checksum, len(entries), size, 0.0)

    def served(manifest: Manifest) -> None:
        engine_logps = engine.score(probe.rows(), temperature=1.0)
        require_served(manifest, probe, trainer_logp=trainer_logps, engine_logp=engine_logps)

    weights = list(merged_state(model.ours))
    names = [name for name, _ in weights]
    assert sum(".experts." in name for name in names) > 2 * 3 * 4
    manifest = send(weights, 1)
    require_received(manifest, engine.received_checksum)
    served(manifest)
    # The gates of two experts change places.
    first, _, second = [place for place, name in enumerate(names) if ".experts." in name][:3]
    assert ".experts.1." in names[second]
    weights[first], weights[second] = (
        (names[first], weights[second][1]),
        (names[second], weights[first][1]),
    )
    with pytest.raises(NotServedError, match="probe tokens are off"):
        served(send(weights, 2))
    with pytest.raises(SyncError, match=f"is not whole.*{names[first]}"):
        send([one for one in merged_state(model.ours) if one[0] != names[first]], 3)
    engine.close()


def test_the_float64_reference_reads_what_is_published(tmp_path: Path) -> None:
    model, (request,) = load("dots1", tmp_path), asking((9,), 12, 1)
    (completion,) = run(native(model, max_tokens=MAX_TOKENS), [request])
    weights = dict(stacked_tensors(model.ours.moe, merged_state(model.ours)))
    tokens_T = np.concatenate([request.tokens_T, completion.tokens_T])
    columns = (completion.prompt_columns, completion.columns)
    routes_TLK = np.concatenate([dense(one["routed_experts"]) for one in columns])
    shape = model.ours.config
    free_T = reference_logprobs(shape, weights, tokens_T)[8:]
    assert_close(completion.engine_logp_T, free_T)
    replayed_T = reference_logprobs(shape, weights, tokens_T, routes_TLK=routes_TLK)[8:]
    np.testing.assert_allclose(replayed_T, free_T, rtol=1e-12)
    other_T = reference_logprobs(shape, weights, tokens_T, routes_TLK=(routes_TLK + 1) % 12)[8:]
    assert np.abs(other_T - free_T).max() > 1e-2
