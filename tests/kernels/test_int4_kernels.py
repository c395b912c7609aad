"""Kernels of INT4 weights against plain torch, and an engine that decodes by packed weights.

On a GPU, or in Triton's interpreter (tests/unit/test_ops_kernels.py).
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from homeostat.config.int4 import Int4Config
from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.ops import kernels
from homeostat.precision.int4 import fake_quantise
from homeostat.precision.int4_packed import hold_packed
from homeostat.precision.int4_rewrite import Int4Rewrite
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.cuda import int4_few, int4_products
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix
from homeostat.rollout.native.cuda.int4_products import Scratch
from homeostat.rollout.native.cuda.int4_weights import Int4Weights
from homeostat.rollout.native.cuda.products import Scaled
from homeostat.rollout.native.cuda.steps import Steps
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE.type == "cuda" else 2e-4
EPS = 1e-6
GROUP = 32


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def near(found: Tensor, wanted: Tensor) -> None:
    largest = TOLERANCE * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE, atol=largest)


def bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_to_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    """Zeros, subnormals, all magnitudes, halves between integers, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 128, generator=generator) * torch.logspace(-44, 37, 24)[:, None]
    weight[0], weight[1, 5], weight[2, 3] = 0.0, float("inf"), float("nan")
    weight[3, :32] = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1e-42] * 4)
    weight = weight.to(DEVICE, dtype)
    for size in (32, 128):
        found = fake_quantise(weight, group_size=size)
        with kernels.plain():
            wanted = fake_quantise(weight.cpu(), group_size=size)
        is_nan = wanted.isnan()
        assert is_nan.any()
        assert torch.equal(found.isnan().cpu(), is_nan)
        assert torch.equal(bits(found)[~is_nan], bits(wanted)[~is_nan])


def packed(num_outputs: int, num_inputs: int, *, group: int = GROUP) -> tuple[Int4Matrix, Tensor]:
    """A matrix of two weights, and what it stands for."""
    weight = drawn(num_outputs, num_inputs, seed=num_inputs)
    parts = weight.split([num_outputs // 2, num_outputs - num_outputs // 2])
    return (
        Int4Matrix.of_weights(parts, group_size=group),
        fake_quantise(weight, group_size=group),
    )


def test_dequantising_gives_back_the_rounded_weight() -> None:
    """The last block of inputs is not full."""
    matrix, rounded = packed(20, 352)
    rows = slice(3, 17)
    assert torch.equal(matrix.dequantised(dtype=DTYPE, rows=rows), rounded[rows])
    with kernels.plain():
        assert torch.equal(matrix.dequantised(dtype=DTYPE), rounded)


@pytest.mark.parametrize("num_rows", [2, pytest.param(21, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_products_of_rows(num_rows: int, group: int) -> None:
    """With a norm whose root is known only as sums of squares, and inputs that are shared out."""
    num_inputs = 288 if group == 32 else 640
    matrix, rounded = packed(96, num_inputs, group=group)
    x_BD, norm_D, bias_O = drawn(num_rows, num_inputs), drawn(num_inputs, seed=1), drawn(96, seed=2)
    squares_BT = torch.stack([p.float().square().sum(1) for p in x_BD.split(100, 1)], 1)
    x = Scaled(x_BD * norm_D, squares_BT.contiguous())
    normed = functional.rms_norm(x_BD.float(), (num_inputs,), norm_D.float(), EPS)
    out_BO, scratch = normed @ rounded.float().T, Scratch(DEVICE)
    near(int4_products.into_heads(x, matrix, bias_O, scratch, eps=EPS), out_BO + bias_O.float())
    wanted = functional.silu(out_BO[:, :48]) * out_BO[:, 48:]
    near(int4_products.gated(x, matrix, scratch, eps=EPS), wanted)
    sum_BO, next_O = drawn(num_rows, 96, seed=3), drawn(96, seed=4)
    wanted = sum_BO.float() + x_BD.float() @ rounded.float().T + bias_O.float()
    found = int4_products.added(sum_BO, x_BD, matrix, bias_O, next_O, scratch)
    near(sum_BO, wanted)
    near(found.rows_BD, wanted * next_O.float())
    assert found.squares_BT is not None
    near(found.squares_BT.sum(1), wanted.square().sum(1))
    assert not scratch.arrived.any()


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (4, 1)])
def test_weights_may_be_read_ahead_by_any_number_of_warps(sizes: tuple[int, int]) -> None:
    """Five units: the last warps have one less, and some are read while others are multiplied."""
    matrix, rounded = packed(32, 288)
    x_BD, out_BO = drawn(3, 288), torch.zeros(3, 32, device=DEVICE, dtype=DTYPE)
    int4_few.launch(Scaled(x_BD), matrix, out_BO, sizes=sizes)
    wanted = x_BD.float() @ rounded.float().T
    near(out_BO, wanted)
    gated_BI = torch.zeros(3, 16, device=DEVICE, dtype=DTYPE)
    int4_few.launch(Scaled(x_BD), matrix, gated_BI, is_gated=True, sizes=sizes)
    near(gated_BI, functional.silu(wanted[:, :16]) * wanted[:, 16:])


# ---- an engine ---------------------------------------------------------------------------------


def tiny(seed: int = 0, **settings: object) -> Decoder:
    config = decoder_config(
        {
            "model_type": "qwen2",
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            **settings,
        }
    )
    torch.manual_seed(seed)
    model = Decoder(config, kernel="sdpa").to(DEVICE, DTYPE)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    lay_side_by_side(model)
    return model.requires_grad_(False)


def opened(model: Decoder, decode: str) -> NativeEngine:
    return NativeEngine(
        model,
        NativeEngineConfig(decode=decode, max_concurrency=6),
        device=DEVICE,
        max_tokens=40,
        decode=None,
        chunk_bytes=1 << 16,
    )


def requests(num_requests: int) -> list[Request]:
    return [
        Request(
            id=f"{number}",
            tokens_T=np.arange(3 + number, 7 + 2 * number) % 32,
            sampling=Sampling(max_new_tokens=2, temperature=1.0, stop_ids=frozenset((31,))),
            seed=number,
        )
        for number in range(num_requests)
    ]


def same(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        if DEVICE.type == "cpu":
            assert one.tokens_T.tolist() == other.tokens_T.tolist()
            np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=1e-4)


@pytest.mark.slow
def test_packed_weights_decode_as_the_trainers_rounded_ones() -> None:
    """A layer that is skipped, a late switch, new weights at a commit; few rows and more."""
    model = tiny()
    config = Int4Config(
        group_size=32, start_step=2, skip_layers=("lm_head", "embed", "layers.0.mlp")
    )
    rewrite = Int4Rewrite(model, config)
    fused, plain = opened(model, "fused"), opened(model, "plain")
    before = generate(plain, requests(1), timeout_s=60)
    same(generate(fused, requests(1), timeout_s=60), before)
    rewrite.begin_step(2)
    after = generate(plain, requests(1), timeout_s=60)
    assert before[0].engine_logp_T.tolist() != after[0].engine_logp_T.tolist()
    same(generate(fused, requests(1), timeout_s=60), after)
    for engine in (fused, plain):
        engine.begin_update(Quiesce.DRAIN)
    for parameter in model.parameters():
        parameter.mul_(1.1).add_(0.01)
    rewrite.weights_changed()
    for engine in (fused, plain):
        engine.commit(1)
    same(generate(fused, requests(5), timeout_s=60), generate(plain, requests(5), timeout_s=60))


@pytest.mark.slow
def test_a_model_that_holds_packed_weights_only_decodes_the_same() -> None:
    model, packed_only = (tiny(seed=1, num_hidden_layers=1) for _ in range(2))
    rewrite = Int4Rewrite(model, Int4Config(group_size=32))
    for layer, weights in zip(packed_only.layers, Int4Weights(model).layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        for maps, packed_maps in (
            ((attention.q_proj, attention.k_proj, attention.v_proj), weights.qkv),
            ((attention.o_proj,), weights.o),
            ((mlp.gate_proj, mlp.up_proj), weights.gate_up),
            ((mlp.down_proj,), weights.down),
        ):
            assert packed_maps is not None
            hold_packed(maps, packed_maps.matrix)
    assert rewrite.is_active
    assert packed_only.layers[0].mlp.down_proj.weight.is_meta
    wanted = generate(opened(model, "plain"), requests(1), timeout_s=60)
    same(generate(opened(packed_only, "fused"), requests(1), timeout_s=60), wanted)
    same(generate(opened(packed_only, "plain"), requests(1), timeout_s=60), wanted)


def test_captured_steps_do_not_serve_weights_that_moved() -> None:
    model = tiny()
    rewrite = Int4Rewrite(model, Int4Config(group_size=32))
    steps = Steps(SimpleNamespace(model=model, refresh=lambda: False), max_rows=1, with_graphs=True)
    steps.refresh()
    steps._graphs[1, False] = None
    # Measured against bf16, and back: nothing moves.
    rewrite.begin_step(0)
    rewrite.begin_step(1)
    steps.refresh()
    weight = model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(AssertionError, match="moved"):
        steps.refresh()
