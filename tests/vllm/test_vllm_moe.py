"""vLLM serves a model with experts: weights arrive under hub names, log-probs are the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.engines import (
    CPU,
    HAS_VLLM,
    SIZES,
    VLLM,
    Model,
    assert_close,
    prompts,
    requests,
    run,
    trainer_logp,
)
from tests.parity.tiny_models import random_model, save
from tests.support.moe import MOE_FAMILIES

from homeostat.config.model import ModelConfig
from homeostat.errors import EngineError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.rollout.engine import Sampling
from homeostat.types import TokenRow

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make test-vllm)"),
]
# Heads and experts as narrow as vLLM has them on a CPU.
WIDTHS = {**SIZES, "head_dim": 32, "moe_intermediate_size": 64}


@pytest.fixture(scope="module", autouse=True)
def close_what_was_kept() -> Iterator[None]:
    yield
    VLLM.close()


def load(folder: Path, *, seed: int) -> Model:
    theirs = random_model({**MOE_FAMILIES["qwen3_moe"], **WIDTHS}, seed=seed)
    loaded = load_model(
        ModelConfig(path=str(save(theirs, folder))),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    )
    assert isinstance(loaded.module, Decoder)
    return Model(theirs, loaded.module, "qwen3_moe", folder)


def test_experts_that_came_by_update_are_served(tmp_path: Path) -> None:
    VLLM(load(tmp_path / "first", seed=0))
    other = load(tmp_path / "second", seed=7)
    engine = VLLM(other)
    wanted = requests(prompts((20, 3)), Sampling(30), samples=2)
    for request, completion in zip(wanted, run(engine, wanted), strict=True):
        logp_T = trainer_logp(other, request.tokens_T, completion.tokens_T, 1.0)
        assert_close(completion.engine_logp_T, logp_T)
        tokens_T = np.concatenate([request.tokens_T, completion.tokens_T])
        row = TokenRow(0, tokens_T, np.ones(len(tokens_T), dtype=np.float32))
        (scored_T,) = engine.score([row], temperature=1.0)
        assert_close(scored_T[len(request.tokens_T) - 1 :], logp_T)


def test_a_request_for_routed_experts_is_refused_with_the_reason(tmp_path: Path) -> None:
    engine = VLLM(load(tmp_path, seed=0))
    assert not engine.capabilities.routed_experts
    (request,) = requests(prompts((5,)), Sampling(2))
    with pytest.raises(EngineError, match="model runner V2"):
        engine.submit(replace(request, routed_experts=True))
