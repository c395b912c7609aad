"""Layers with experts on a GPU: grouped products, their bits, and recorded routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from homeostat.columns import dense
from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.routing import Routing
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.ops import kernels
from homeostat.ops.attention import PackedLayout
from homeostat.ops.experts import experts_of
from homeostat.ops.kernels.grouped import cut_of, grouped_product, grouped_tiles
from homeostat.ops.linear import Numerics
from homeostat.ops.pairs import pairs_of
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def drawn(*sizes: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return (scale * torch.randn(*sizes, generator=generator)).to(DEVICE, BF16)


class Layer:
    """Some tokens, their experts, and the matrices. The last experts have no tokens."""

    def __init__(self, num_tokens: int, *, width: int, size: int, experts: int, slots: int) -> None:
        self.x = drawn(num_tokens, width, seed=0)
        self.gate_up = drawn(experts, 2 * size, width, seed=1, scale=0.05)
        self.down = drawn(experts, width, size, seed=2, scale=0.05)
        wanted = drawn(num_tokens, experts, seed=3).float()
        wanted[:, -2:] = -9.0
        self.ids, self.weights = wanted.topk(slots).indices, drawn(num_tokens, slots, seed=4).abs()
        self.upstream = drawn(num_tokens, width, seed=5)

    def out(self, rows: Any = slice(None), *, numerics: Numerics) -> Tensor:
        given = self.x[rows], self.ids[rows], self.weights[rows].float(), self.gate_up, self.down
        return experts_of(*given, numerics=numerics)

    def results(self, kernel: str, numerics: Numerics, dtype: torch.dtype) -> list[Tensor]:
        leaves = (self.x, self.weights, self.gate_up, self.down)
        dtypes = (dtype, torch.float32, dtype, dtype)
        x, weights, gate_up, down = (
            leaf.to(to, copy=True).requires_grad_() for leaf, to in zip(leaves, dtypes, strict=True)
        )
        out = experts_of(x, self.ids, weights, gate_up, down, numerics=numerics, kernel=kernel)
        upstream = self.upstream.to(dtype)
        return [out.detach(), *torch.autograd.grad(out, (x, weights, gate_up, down), upstream)]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("size", [(700, 512, 256, 16, 4), (33, 96, 40, 64, 8), (1, 64, 48, 4, 2)])
def test_grouped_equals_plain_and_waits_for_nothing(
    size: tuple[int, ...], numerics: Numerics
) -> None:
    num_tokens, width, inner, experts, slots = size
    layer = Layer(num_tokens, width=width, size=inner, experts=experts, slots=slots)
    with kernels.plain():
        wanted = layer.results("plain", "fast", torch.float32)
    layer.results("auto", numerics, BF16)
    # What memory held before must not show through where an expert has no rows.
    poison = [torch.full((experts, 2 * inner, width), torch.nan, device=DEVICE, dtype=BF16)] * 3
    del poison
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = layer.results("auto", numerics, BF16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, plain in zip(found, wanted, strict=True):
        assert float((ours.float() - plain).norm() / plain.norm()) < 0.01
    assert not found[3][-2:].any()
    assert not found[4][-2:].any()


def test_a_token_has_the_same_bits_whatever_else_is_in_the_pass() -> None:
    """From one token to thousands, in tiles of every shape."""
    layer = Layer(5000, width=2048, size=768, experts=32, slots=4)
    whole = layer.out(numerics="invariant")
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for count in (1, 2, 31, 64, 130, 700, 4999):
        rows = order[:count]
        assert torch.equal(layer.out(rows, numerics="invariant"), whole[rows]), count


def test_every_tile_gives_the_same_bits() -> None:
    layer = Layer(300, width=896, size=200, experts=8, slots=2)
    pairs = pairs_of(layer.ids, 8, like=layer.x)
    found = [
        grouped_product(
            layer.x, layer.gate_up, pairs, cut_of(pairs, like=layer.x, tile=tile), num_slots=2
        )
        for tile in grouped_tiles()
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def model(kind: str, dtype: torch.dtype, numerics: Numerics) -> Decoder:
    kinds = {
        "qwen3_moe": {"num_experts": 300, "num_experts_per_tok": 4},
        "dots1": {
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    }
    shape = {
        "model_type": kind,
        "vocab_size": 3000,
        "hidden_size": 256,
        "intermediate_size": 320,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        **kinds[kind],
    }
    torch.manual_seed(0)
    made = Decoder(decoder_config(shape), kernel="sdpa", numerics=numerics)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    made = made.to(device=DEVICE, dtype=dtype).requires_grad_(False)
    lay_side_by_side(made)
    return made


@pytest.mark.parametrize("concurrency", [3, 24])
@pytest.mark.parametrize("kind", ["qwen3_moe", "dots1"])
@pytest.mark.parametrize(
    ("dtype", "numerics"), [(torch.float32, "fast"), (BF16, "invariant")], ids=["fast", "invariant"]
)
def test_graphs_record_the_routes_that_a_pass_over_all_tokens_takes(
    kind: str, dtype: torch.dtype, numerics: Numerics, concurrency: int
) -> None:
    made = model(kind, dtype, numerics)
    engine = NativeEngine(
        made,
        NativeEngineConfig(decode="graphs", max_concurrency=concurrency),
        device=DEVICE,
        max_tokens=100,
        decode=None,
        chunk_bytes=1 << 26,
    )
    rng = np.random.default_rng(0)
    wants = {"routed_experts": True, "routed_weights": True}
    asked = [
        Request(str(index), rng.integers(0, 3000, 5), Sampling(18), seed=0, **wants)
        for index in range(24)
    ]
    completions = generate(engine, asked, timeout_s=100)
    num_wrong = num_all = 0
    for request, completion in zip(asked, completions, strict=True):
        tokens_N = np.concatenate([request.tokens_T, completion.tokens_T])
        routing = Routing(records=True)
        made.hidden(
            torch.from_numpy(tokens_N).to(DEVICE),
            torch.arange(len(tokens_N), device=DEVICE),
            PackedLayout.of([len(tokens_N)], DEVICE),
            routing=routing,
        )
        columns = [completion.prompt_columns, *(s.columns for s in completion.segments)]
        found_TLK = np.concatenate([dense(one["routed_experts"]) for one in columns])
        # The last token is never run.
        wrong_TLK = (found_TLK != routing.recorded().cpu().numpy())[:-1]
        num_wrong, num_all = num_wrong + int(wrong_TLK.sum()), num_all + wrong_TLK.size
        weights_TLK = np.concatenate([dense(one["routed_weights"]) for one in columns])
        gap_TLK = np.abs(weights_TLK - routing.recorded_weights().cpu().numpy())[:-1]
        limit = 0.0 if numerics == "invariant" else 1e-4
        assert gap_TLK[~wrong_TLK].max() <= limit
    # To rounding, the order of two experts may change.
    assert num_wrong == 0 if numerics == "invariant" else num_wrong < 0.002 * num_all
