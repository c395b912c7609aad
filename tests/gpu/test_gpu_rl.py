"""RL on a GPU: the engine in blocks, the trainer, and how far their log-probs are apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import runs, tiny_rl

from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.train.build import load
from homeostat.train.runtime import resolve_runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bf16 keeps 8 bits: a log-prob of -3 is known to about 0.01. In FP8 a last bit of bf16 can move an
# activation to its neighbour, which is 6 % away.
NEAR = {"fp32": 1e-4, "bf16": 0.1, "int4": 0.1, "fp8": 0.5}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_learns_with_an_engine_that_agrees(tmp_path: Path, precision: str) -> None:
    config = tiny_rl.config(
        tmp_path, "trainer.device=cuda", f"trainer.precision={precision}", "trainer.max_steps=6"
    )
    runs.train(config)
    records = list(read_metrics(config.run_dir / "metrics.jsonl"))
    assert len(records) == 6
    # A step in which all groups earn the same makes no update, and has no loss.
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert len(losses) >= 4
    assert np.isfinite(losses).all()
    for record in records:
        assert record["sampling/sampling_logp_difference/max"] < NEAR[precision]


@pytest.mark.parametrize("width", [256, 192])
@pytest.mark.parametrize("section", ["fp8={recipe: blockwise}", "int4={group_size: 32}"])
def test_an_engine_agrees_after_its_layers_were_measured(
    tmp_path: Path, section: str, width: int
) -> None:
    """The first steps are measured against bf16, with the layers switched off and on again between
    two rollouts. What the engine has captured must still be what it decodes with. A width of 192 is
    no whole number of blocks of 128, so that FP8 products are padded."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": 64}
    tiny_rl.write_model(tmp_path / "model", **sizes)
    config = tiny_rl.config(
        tmp_path,
        f"trainer.{section}",
        "trainer.device=cuda",
        "trainer.precision=bf16",
        "trainer.max_steps=6",
        # Also the rows of a wide step, which are multiplied by rounded copies.
        "rollout.prompts_per_step=16",
        "rollout.samples_per_prompt=8",
        "engine.max_concurrency=128",
    )
    runs.train(config)
    records = list(read_metrics(config.run_dir / "metrics.jsonl"))
    assert any("train/loss" in record for record in records)
    for record in records:
        assert record["sampling/sampling_logp_difference/max"] < NEAR[section.partition("=")[0]]


def test_a_request_samples_the_same_alone_and_in_a_crowd(tmp_path: Path) -> None:
    """In fp32, where rounding does not decide a token."""
    config = tiny_rl.config(tmp_path, "trainer.device=cuda", "trainer.precision=fp32")
    runtime = resolve_runtime(config)
    loaded = load(config.model, None, config=config, runtime=runtime)
    engine = NativeEngine(
        loaded.module,
        config.engine,
        device=runtime.device,
        max_tokens=40,
        decode=None,
        chunk_bytes=2**20,
    )
    rng = np.random.default_rng(0)
    requests = [
        Request(
            id=f"r{index}",
            tokens_T=rng.integers(0, 11, int(rng.integers(1, 20))),
            sampling=Sampling(max_new_tokens=12, stop_ids=frozenset({11})),
            seed=0,
            session_key=f"g{index // 4}",
        )
        for index in range(16)
    ]
    together = generate(engine, requests, timeout_s=60)
    for request, completion in zip(requests, together, strict=True):
        alone = generate(engine, [request], timeout_s=60)[0]
        assert alone.tokens_T.tolist() == completion.tokens_T.tolist()
        np.testing.assert_allclose(alone.engine_logp_T, completion.engine_logp_T, atol=1e-4)
