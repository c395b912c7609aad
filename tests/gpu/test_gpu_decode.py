"""Decoding in CUDA graphs: to the bit what the same kernels give without, near the plain way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


EXPERTS = {
    "qwen3_moe": {"num_experts": 40, "num_experts_per_tok": 4, "moe_intermediate_size": 136},
    "dots1": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 136,
        "first_k_dense_replace": 1,
    },
}


def model(kind: str, dtype: torch.dtype, *, intermediate_size: int = 1000) -> Decoder:
    shape = {
        "model_type": kind,
        "vocab_size": 12_000,
        "hidden_size": 576,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64 if kind == "qwen2" else 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        **EXPERTS.get(kind, {}),
    }
    torch.manual_seed(0)
    kernel = "varlen" if dtype == torch.bfloat16 else "sdpa"
    made = Decoder(decoder_config(shape), kernel=kernel)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    made = made.to(device=DEVICE, dtype=dtype).requires_grad_(False)
    lay_side_by_side(made)
    return made


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 12_000, int(rng.integers(1, 300))) for _ in range(count // 4)]
    return [
        Request(
            id=str(index),
            tokens_T=prompts[index // 4],
            sampling=Sampling(
                max_new_tokens=int(rng.integers(1, 120)),
                temperature=(1.0, 0.0, 0.7)[index % 3],
                stop_ids=frozenset(range(50)),
            ),
            seed=0,
            session_key=str(index // 4),
        )
        for index in range(count)
    ]


def sampled(made: Decoder, how: str, *, max_concurrency: int, count: int = 32) -> list[Completion]:
    engine = NativeEngine(
        made,
        NativeEngineConfig(decode=how, max_concurrency=max_concurrency),
        device=DEVICE,
        max_tokens=500,
        decode=None,
        chunk_bytes=1 << 26,
    )
    once = generate(engine, requests(count), timeout_s=100)
    # Graphs outlive the cache that they were captured with.
    engine.sleep()
    again = generate(engine, requests(count), timeout_s=100)
    engine.close()
    assert equal_bits(once, again)
    return once


def equal_bits(first: list[Completion], second: list[Completion]) -> bool:
    return all(
        one.tokens_T.tolist() == other.tokens_T.tolist()
        and one.engine_logp_T.tolist() == other.engine_logp_T.tolist()
        for one, other in zip(first, second, strict=True)
    )


def are_near(graphs: list[Completion], plain: list[Completion], near: float) -> None:
    for one, other in zip(graphs, plain, strict=True):
        # Where rounding decides one token, the next ones follow another text.
        length = min(len(one.tokens_T), len(other.tokens_T))
        apart = np.flatnonzero(one.tokens_T[:length] != other.tokens_T[:length])
        length = int(apart[0]) if len(apart) else length
        gap_T = np.abs(one.engine_logp_T[:length] - other.engine_logp_T[:length])
        assert gap_T.max(initial=0) < near


def are_near_on_average(graphs: list[Completion], plain: list[Completion], near: float) -> None:
    """Of second tokens, the first that are decoded: rounding to bf16 sends some rows to another
    expert."""
    gaps = [
        abs(one.engine_logp_T[1] - other.engine_logp_T[1])
        for one, other in zip(graphs, plain, strict=True)
        if len(one.tokens_T) > 1 and one.tokens_T[:2].tolist() == other.tokens_T[:2].tolist()
    ]
    assert len(gaps) > len(graphs) // 2
    assert np.mean(gaps) < near


@pytest.mark.parametrize("max_concurrency", [2, 29])
@pytest.mark.parametrize("kind", list(EXPERTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_graphs(kind: str, dtype: torch.dtype, max_concurrency: int) -> None:
    made = model(kind, dtype)
    graphs = sampled(made, "graphs", max_concurrency=max_concurrency)
    assert equal_bits(graphs, sampled(made, "fused", max_concurrency=max_concurrency))
    plain = sampled(made, "plain", max_concurrency=max_concurrency)
    if dtype == torch.float32:
        are_near(graphs, plain, 2e-4)
    else:
        are_near_on_average(graphs, plain, 0.05)


@pytest.mark.parametrize("max_concurrency", [2, 29])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_fused_and_plain(kind: str, dtype: torch.dtype, max_concurrency: int) -> None:
    made = model(kind, dtype)
    graphs = sampled(made, "graphs", max_concurrency=max_concurrency)
    fused = sampled(made, "fused", max_concurrency=max_concurrency)
    plain = sampled(made, "plain", max_concurrency=max_concurrency)
    assert equal_bits(graphs, fused)
    are_near(graphs, plain, 1e-4 if dtype == torch.float32 else 0.05)
    if dtype == torch.float32:
        pairs = zip(graphs, plain, strict=True)
        differ = sum(one.tokens_T.tolist() != other.tokens_T.tolist() for one, other in pairs)
        assert differ <= 2


def test_many_rows() -> None:
    """Tall tiles, and long sums in shares."""
    made = model("qwen2", torch.bfloat16, intermediate_size=2600)
    graphs = sampled(made, "graphs", max_concurrency=100, count=128)
    assert equal_bits(graphs, sampled(made, "fused", max_concurrency=100, count=128))
    are_near(graphs, sampled(made, "plain", max_concurrency=100, count=128), 0.05)
