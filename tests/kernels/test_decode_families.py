"""Bursts of blocks other than Llama's sample what the plain engine samples."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from tests.parity.tiny_families import BLOCKS
from tests.parity.tiny_models import SIZES

from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)


def model(name: str) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(decoder_config({**SIZES, **BLOCKS[name]}), kernel="sdpa")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.to(DEVICE)


def engine(made: Decoder, how: str) -> NativeEngine:
    config = NativeEngineConfig(decode=how, max_concurrency=4)
    return NativeEngine(
        made, config, device=DEVICE, max_tokens=60, decode=None, chunk_bytes=1 << 16
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gemma3", "mistral_window", "phi4_mini", "granite", "olmo2", "glm4"]
)
def test_bursts_of_other_blocks_sample_what_the_plain_engine_samples(name: str) -> None:
    made, rng = model(name), np.random.default_rng(1)
    prompts = [rng.integers(1, 97, length) for length in (3, 9)]
    wanted = [Request(f"{n}", tokens, Sampling(7), seed=2) for n, tokens in enumerate(prompts)]
    fused = engine(made, "fused")
    assert fused.bursts is not None
    found, plain = (generate(one, wanted, timeout_s=300) for one in (fused, engine(made, "plain")))
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.tokens_T.tolist() == theirs.tokens_T.tolist()
        np.testing.assert_allclose(ours.engine_logp_T, theirs.engine_logp_T, atol=1e-4)


def test_capped_logits_are_left_to_the_plain_path() -> None:
    with pytest.raises(EngineError, match="soft-capped logits"):
        engine(model("gemma2"), "fused")
    assert engine(model("gemma2"), "auto").bursts is None
