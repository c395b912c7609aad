"""Adapters in decoding's products against float64, and in an engine against the plain one.

On a GPU, or in Triton's interpreter (tests/unit/test_ops_kernels.py).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from homeostat.config.model import LoraConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.models.blocks import MLP
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.lora import adapter_state, apply_lora
from homeostat.models.lora_layers import LoraLinear
from homeostat.models.side_by_side import (
    adapted_maps,
    lay_adapters_side_by_side,
    lay_side_by_side,
    neighbours,
)
from homeostat.ops import kernels
from homeostat.ops.linear import Linear
from homeostat.precision import nf4
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.cuda import narrow, products
from homeostat.rollout.native.cuda.forward import Adapters
from homeostat.rollout.native.cuda.low_rank import LowRank
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 2e-2 if torch.bfloat16 == DTYPE else 5e-5
EPS = 1e-6
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def adapted(*, rank: int = 5, targets: tuple[str, ...] = ("all-linear",)) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(decoder_config(SHAPE), kernel="sdpa").to(device=DEVICE, dtype=DTYPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    apply_lora(model, LoraConfig(rank=rank, alpha=2.0 * rank, targets=targets), seed=0)
    for _, tensor in adapter_state(model):
        torch.nn.init.normal_(tensor, std=0.3)
    lay_side_by_side(model)
    lay_adapters_side_by_side(model)
    return model.requires_grad_(False)


def rows(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(device=DEVICE, dtype=DTYPE)


def normed(x_BD: Tensor, norm_D: Tensor) -> Tensor:
    x = x_BD.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm_D.double()


def in_float64(linear: Linear, x: Tensor) -> Tensor:
    out = x @ linear.weight.double().T
    if linear.bias is not None:
        out = out + linear.bias.double()
    if isinstance(linear, LoraLinear):
        low = x @ linear.lora_A.weight.double().T
        out = out + linear.scaling * (low @ linear.lora_B.weight.double().T)
    return out


def gated_in_float64(mlp: MLP, x: Tensor) -> Tensor:
    return functional.silu(in_float64(mlp.gate_proj, x)) * in_float64(mlp.up_proj, x)


def near(found: Tensor, wanted: Tensor) -> None:
    largest = wanted.abs().max().item()
    assert (found.double() - wanted).abs().max().item() <= TOLERANCE * largest


def of_first_layer(model: Decoder) -> list[LowRank | None]:
    return Adapters(model, max_rows=products.MAX_ROWS).of_layer(0)


@pytest.mark.parametrize(
    "targets",
    [
        ("q_proj", "v_proj", "up_proj"),
        pytest.param(("all-linear",), marks=pytest.mark.slow),
    ],
)
def test_narrow_products_with_adapters(targets: tuple[str, ...]) -> None:
    model = adapted(targets=targets)
    layer, (heads, out, gates, down) = model.layers[0], of_first_layer(model)
    attention, mlp = layer.self_attn, layer.mlp
    assert (out is None, down is None) == (targets != ("all-linear",),) * 2
    x_BD, norm_D = rows(3, 40, seed=1), layer.input_layernorm.weight
    maps = attention.q_proj, attention.k_proj, attention.v_proj
    weights, biases = tuple(m.weight for m in maps), tuple(m.bias for m in maps)
    found = narrow.into_heads(
        x_BD, norm_D, narrow.HeadMaps(weights, biases), eps=EPS, adapter=heads
    )
    for linear, part in zip(maps, found, strict=True):
        near(part, in_float64(linear, normed(x_BD, norm_D)))
    wanted = normed(x_BD, norm_D)
    gated_BI = narrow.gated(
        x_BD, norm_D, mlp.gate_proj.weight, mlp.up_proj.weight, eps=EPS, adapter=gates
    )
    near(
        gated_BI,
        functional.silu(in_float64(mlp.gate_proj, wanted)) * in_float64(mlp.up_proj, wanted),
    )
    inputs_BI, sum_BD = rows(3, 72, seed=2), x_BD.clone()
    narrow.added(sum_BD, inputs_BI, mlp.down_proj.weight, adapter=down)
    near(sum_BD, x_BD.double() + in_float64(mlp.down_proj, inputs_BI.double()))


@pytest.mark.parametrize("rank", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_tiled_products_with_adapters(rank: int) -> None:
    """A rank of 40 takes two tiles for the heads' A."""
    model = adapted(rank=rank)
    layer, (heads, _, gates, down) = model.layers[0], of_first_layer(model)
    attention, mlp = layer.self_attn, layer.mlp
    x_BD, norm_D = rows(19, 40, seed=1), layer.input_layernorm.weight
    squares_BT = x_BD.float().square().sum(1, keepdim=True)
    scaled = products.Scaled(x_BD * norm_D, squares_BT)
    maps = attention.q_proj, attention.k_proj, attention.v_proj
    assert heads is not None
    weight_OD, bias_O = heads.maps.whole_PK[heads.ahead :], torch.cat([m.bias for m in maps])
    found_BX = products.into_heads(scaled, weight_OD, bias_O, eps=EPS, adapter=heads)
    wanted = normed(x_BD, norm_D)
    near(found_BX, torch.cat([in_float64(linear, wanted) for linear in maps], 1))
    gated_BI = products.gated(scaled, weight_OD, eps=EPS, adapter=gates)
    near(
        gated_BI,
        functional.silu(in_float64(mlp.gate_proj, wanted)) * in_float64(mlp.up_proj, wanted),
    )
    inputs_BI, sum_BD = rows(19, 72, seed=2), x_BD.clone()
    scratch, weight_DI = products.Scratch(DEVICE), mlp.down_proj.weight
    after = products.added(sum_BD, inputs_BI, weight_DI, norm_D, scratch, adapter=down)
    near(sum_BD, x_BD.double() + in_float64(mlp.down_proj, inputs_BI.double()))
    assert after.squares_BT is not None
    near(after.squares_BT.sum(1), sum_BD.double().square().sum(1))
    near(after.rows_BD, sum_BD.double() * norm_D.double())


@pytest.mark.parametrize("has_adapters", [False, True])
def test_adapters_keep_to_fused_products_where_a_library_is_better_without_them(
    has_adapters: bool,
) -> None:
    """The widths are those of 0.5 B and 1.5 B models."""
    assert products.are_better(256, 4864, has_adapters=has_adapters)
    assert products.are_better(256, 8960, has_adapters=has_adapters) == has_adapters
    assert not products.are_better(257, 4864, has_adapters=has_adapters)


@pytest.mark.parametrize("shape", [(5, 21), (70, 64)])
def test_nf4_codes_become_the_values_of_the_reference(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight.view(-1)[:64] = 0.0
    packed_P, absmax_B = nf4.quantise(weight)
    # The interpreter cuts bits off where a GPU rounds to bf16.
    for dtype in (torch.float32, torch.bfloat16)[: 1 + (DEVICE.type == "cuda")]:
        how = {"shape": weight.shape, "dtype": dtype}
        found = nf4.dequantise(packed_P, absmax_B, **how)
        wanted = nf4.dequantise(packed_P.cpu(), absmax_B.cpu(), **how)
        with kernels.plain():
            assert torch.equal(found, nf4.dequantise(packed_P, absmax_B, **how))
        assert DEVICE.type == "cpu" or torch.equal(found.cpu(), wanted)


def test_parameters_keep_their_values_where_adapters_join_them() -> None:
    model = adapted(targets=("k_proj", "down_proj"))
    whole = [adapted_maps(maps) for maps in neighbours(model.layers[0])]
    assert [maps is not None for maps in whole] == [True, False, False, True]
    attention, heads = model.layers[0].self_attn, whole[0]
    assert heads is not None
    assert heads.sizes == (64, 32, 32)
    assert torch.equal(heads.whole_PK[heads.ahead :][64:96], attention.k_proj.weight)
    # Of maps without an adapter A and B are zero.
    assert not heads.whole_PK[:5].any()
    assert torch.equal(heads.whole_PK[5:10], attention.k_proj.lora_A.weight)
    assert not heads.b_OR[:64].any()
    assert torch.equal(heads.b_OR[64:96], attention.k_proj.lora_B.weight)


def sampled(model: Decoder, decode: str, num_rows: int) -> list[Completion]:
    engine = NativeEngine(
        model,
        NativeEngineConfig(decode=decode, max_concurrency=num_rows),
        device=DEVICE,
        max_tokens=64,
        decode=None,
        chunk_bytes=1 << 16,
    )
    if decode == "fused":
        forward = engine.bursts.steps.forward
        assert forward.can_be_narrow
        assert forward.can_be_tiled
    requests = [
        Request(
            id=f"r{row}",
            tokens_T=np.array([3, 5 + row]),
            sampling=Sampling(max_new_tokens=3, temperature=1.0, stop_ids=frozenset()),
            seed=0,
            session_key=str(row),
        )
        for row in range(num_rows)
    ]
    found = generate(engine, requests, timeout_s=300)
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [6, 2])
def test_an_engine_decodes_with_adapters_by_fused_kernels(num_rows: int) -> None:
    """Two rows take the narrow path, six the tiled one."""
    model = adapted()
    pairs = zip(*(sampled(model, how, num_rows) for how in ("fused", "plain")), strict=True)
    for fused, plain in pairs:
        length = 1 if DEVICE.type == "cuda" else 3
        assert fused.tokens_T[:length].tolist() == plain.tokens_T[:length].tolist()
        gap = np.abs(fused.engine_logp_T[:length] - plain.engine_logp_T[:length]).max()
        assert gap < (0.1 if DEVICE.type == "cuda" else 2e-5)
