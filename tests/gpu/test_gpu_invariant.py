"""Invariant numerics on a GPU: engine, scoring and training give a token the same bits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import runs, tiny_rl
from torch import Tensor

pytest.importorskip("triton")

from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.observe.jsonl import read_metrics
from homeostat.ops.attention import PackedLayout
from homeostat.ops.kernels.products import Tile, half_tiles, product
from homeostat.ops.linear import tiled_product
from homeostat.ops.logprobs import token_logprobs
from homeostat.ops.norms import add_rms_norm, rms_norm
from homeostat.ops.tiled_attention import TiledAttention, TilePlan, tiled_attention
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, TokenRow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
VOCAB = 12_000
SHAPES = {
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 14, "head_dim": 64},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 8, "head_dim": 128},
    "odd": {"model_type": "qwen2", "num_attention_heads": 2, "hidden_size": 90, "head_dim": 20},
    "experts": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_experts": 24,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 200,
        "norm_topk_prob": True,
    },
    "shared": {
        "model_type": "dots1",
        "num_attention_heads": 8,
        "head_dim": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 136,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
}
KINDS = [
    ("qwen2", torch.bfloat16),
    ("qwen3", torch.bfloat16),
    ("odd", torch.float32),
    ("experts", torch.bfloat16),
    ("experts", torch.float32),
    ("shared", torch.bfloat16),
]


@cache
def model(kind: str, dtype: torch.dtype, numerics: str = "invariant") -> Decoder:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 576,
        "intermediate_size": 1000,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        **SHAPES[kind],
    }
    torch.manual_seed(0)
    kernel = "varlen" if dtype == torch.bfloat16 else "sdpa"
    made = Decoder(decoder_config(shape), kernel=kernel, numerics=numerics)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return made.to(device=DEVICE, dtype=dtype)


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 300))) for _ in range(8)]
    return [
        Request(
            id=str(index),
            tokens_T=prompts[index // 4],
            sampling=Sampling(
                max_new_tokens=int(rng.integers(1, 90)), temperature=(1.0, 0.7)[index % 2]
            ),
            seed=0,
            session_key=str(index // 4),
        )
        for index in range(32)
    ]


def sampled(made: Decoder, **settings: Any) -> tuple[NativeEngine, list[Completion]]:
    engine = NativeEngine(
        made,
        NativeEngineConfig(**settings),
        device=DEVICE,
        max_tokens=500,
        decode=None,
        chunk_bytes=1 << 26,
    )
    return engine, generate(engine, requests(), timeout_s=200)


def rows_of(completions: list[Completion]) -> list[TokenRow]:
    rows = []
    for request, completion in zip(requests(), completions, strict=True):
        whole_T = np.concatenate([request.tokens_T, completion.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= len(request.tokens_T)).astype(np.float32)
        rows.append(TokenRow(len(rows), whole_T, is_new_T))
    return rows


def trained_logp(made: Decoder, rows: list[TokenRow], *, temperature: float) -> list[list[float]]:
    """By a forward pass that keeps what the backward pass needs, all rows packed."""
    layout = PackedLayout.of([len(row) for row in rows], DEVICE)
    tokens_N = torch.from_numpy(np.concatenate([row.tokens_T for row in rows])).to(DEVICE)
    positions_N = torch.cat([torch.arange(len(row)) for row in rows]).to(DEVICE)
    hidden_ND = made.hidden(tokens_N, positions_N, layout)
    logp_N = token_logprobs(
        hidden_ND,
        made.output_weight(),
        tokens_N.roll(-1),
        temperature=temperature,
        chunk_bytes=1 << 23,
        numerics=made.numerics,
    )
    assert logp_N.requires_grad
    parts = logp_N.roll(1).tolist()
    return [
        parts[at + int((row.weights_T == 0).sum()) : at + len(row)]
        for row, at in zip(rows, layout.offsets, strict=True)
    ]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_engine_scoring_and_training_agree_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    made = model(kind, dtype)
    engine, completions = sampled(made, decode="graphs", max_concurrency=29, prefill_tokens=64)
    ways = [("auto", 3), ("auto", 32), ("fused", 17), ("plain", 5)]
    for how, concurrency in ways:
        _, others = sampled(made, decode=how, max_concurrency=concurrency)
        for one, other in zip(completions, others, strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist(), how
            assert one.engine_logp_T.tolist() == other.engine_logp_T.tolist(), how
    rows = rows_of(completions)
    for first, temperature in enumerate((1.0, 0.7)):
        chosen, told = rows[first::2], completions[first::2]
        scored = engine.score(chosen, temperature=temperature)
        trained = {}
        for checkpointing in (False, "selective", True):
            made.gradient_checkpointing = checkpointing
            trained[checkpointing] = trained_logp(made, chosen, temperature=temperature)
        for index, completion in enumerate(told):
            sampled_T = completion.engine_logp_T.tolist()
            assert scored[index].tolist() == sampled_T
            for checkpointing, found in trained.items():
                assert found[index] == sampled_T, (index, checkpointing)


def test_fast_numerics_do_not() -> None:
    """What the other tests would miss if they compared a thing with itself."""
    engine, completions = sampled(model("qwen2", torch.bfloat16, "fast"), max_concurrency=29)
    rows = rows_of(completions)[::2]
    scored = engine.score(rows, temperature=1.0)
    told = [completion.engine_logp_T for completion in completions[::2]]
    assert not np.array_equal(np.concatenate(scored), np.concatenate(told))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_has_no_difference_at_all(tmp_path: Path, checkpointing: bool) -> None:
    config = tiny_rl.config(
        tmp_path,
        "trainer.device=cuda",
        "trainer.precision=bf16",
        "trainer.max_steps=3",
        "model.numerics=invariant",
        f"trainer.gradient_checkpointing={str(checkpointing).lower()}",
    )
    runs.train(config)
    records = list(read_metrics(config.run_dir / "metrics.jsonl"))
    name = "sampling/sampling_logp_difference/max"
    assert [record[name] for record in records] == [0.0] * 3


def drawn(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize(("inputs", "outputs"), [(896, 4864), (4864, 896), (896, 128), (90, 33)])
def test_a_row_of_a_product_does_not_depend_on_the_others(inputs: int, outputs: int) -> None:
    x, weight, bias = (
        drawn(1000, inputs, seed=0),
        drawn(outputs, inputs, seed=1),
        drawn(outputs, seed=2),
    )
    whole = tiled_product(x, weight, bias)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for size in (1, 2, 15, 16, 17, 64, 127, 128, 129, 512, 999):
        rows = order[:size]
        assert torch.equal(tiled_product(x[rows], weight, bias), whole[rows]), size
    assert torch.equal(tiled_product(x[7:], weight, bias), whole[7:])


@pytest.mark.parametrize("tile", half_tiles())
@pytest.mark.parametrize(("inputs", "outputs"), [(896, 4864), (4864, 896), (90, 33)])
def test_every_tile_gives_the_same_bits(tile: Tile, inputs: int, outputs: int) -> None:
    x, weight = drawn(200, inputs, seed=3), drawn(outputs, inputs, seed=4)
    wanted = product(x, weight, None, out_dtype=torch.float32, tile=half_tiles()[0])
    assert torch.equal(product(x, weight, None, out_dtype=torch.float32, tile=tile), wanted)
    exact = x.double() @ weight.double().T
    assert float((wanted - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("size", [64, 90, 128, 896, 1536, 4096])
def test_a_norm_has_the_same_bits_with_its_sum_and_after_it(size: int) -> None:
    x, y, weight = drawn(300, size, seed=0), drawn(300, size, seed=1), drawn(size, seed=2)
    total, normed = add_rms_norm(x, y, weight, eps=1e-6)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, rms_norm(x + y, weight, eps=1e-6))
    for rows in (1, 3, 16, 299):
        alone = add_rms_norm(x[:rows].clone(), y[:rows].clone(), weight, eps=1e-6)[1]
        assert torch.equal(alone, normed[:rows]), rows


@pytest.mark.parametrize(("heads", "dim"), [((14, 2), 64), ((12, 2), 128), ((4, 4), 64)])
def test_decoding_has_the_bits_of_training(heads: tuple[int, int], dim: int) -> None:
    """One query a document, over rows in another order, against whole documents packed."""
    lengths = [700, 1, 64, 65, 513]
    layout = PackedLayout.of(lengths, DEVICE)
    counts = (heads[0], heads[1], heads[1])
    q, k, v = (drawn(layout.num_tokens, n, dim, seed=at) for at, n in enumerate(counts))
    whole = TiledAttention.of(layout, num_kv_heads=heads[1]).attend(0, q, k, v, scale=0.2)
    order = torch.randperm(layout.num_tokens, generator=torch.Generator().manual_seed(1))
    keys, values = (x[order.to(DEVICE)].flatten(0, 1) for x in (k, v))
    place = order.argsort()
    token_BT = torch.tensor(layout.offsets)[:, None] + torch.arange(max(lengths))
    row_BT = place[token_BT.clamp_(max=layout.num_tokens - 1)] * heads[1]
    for ends in (lengths, [min(length, 60) for length in lengths], [1, 1, 1, 1, 1]):
        at = [offset + end - 1 for offset, end in zip(layout.offsets, ends, strict=True)]
        plan = TilePlan.of(
            torch.ones(5, dtype=torch.int64),
            torch.tensor(ends),
            row_BT.to(DEVICE),
            num_kv_heads=heads[1],
            head_stride=1,
        )
        assert torch.equal(tiled_attention(q[at], keys, values, plan, scale=0.2), whole[at]), ends
