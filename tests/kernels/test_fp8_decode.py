"""FP8 kernels of decoding and of the invariant numerics, against precision/fp8.py and float64.

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

from homeostat.config.fp8 import Fp8Config
from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.ops.kernels.fp8_tiles import FEW, MANY, scaled_product
from homeostat.precision.fp8 import Quantised, dequantise, quantise
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.cuda import fp8_narrow, fp8_products, fp8_rows, products
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.native.fp8_weights import Fp8Weight, Scaling, fp8_maps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
EPS = 1e-6
# Log-probs of a tiny model. Tensor cores drop bits of a sum, and then some of the next rows are
# cast to the neighbouring FP8 number.
SAMPLED = 2e-3 if DEVICE.type == "cpu" else 0.25
SCALINGS = [Scaling(True, False), Scaling(True, True), Scaling(False, False)]
IDS = ["blocks", "powers", "rows"]
each_scaling = pytest.mark.parametrize("scaling", SCALINGS, ids=IDS)


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rows_of(x_BK: Tensor, scaling: Scaling) -> Quantised:
    block = (1, 128 if scaling.is_blockwise else None)
    return quantise(x_BK, block=block, power_of_two=scaling.has_power_of_two_scales)


def seen(x_BK: Tensor, scaling: Scaling) -> Tensor:
    """The numbers that a product of quantised rows sees, in float64."""
    return dequantise(rows_of(x_BK, scaling)).double()


def weight_of(weight_OK: Tensor, scaling: Scaling) -> tuple[Fp8Weight, Tensor]:
    block = (128, 128) if scaling.is_blockwise else (1, None)
    found = quantise(weight_OK, block=block, power_of_two=scaling.has_power_of_two_scales)
    scales = found.scales if scaling.is_blockwise else found.scales.flatten()
    weight = Fp8Weight(found.values, scales.contiguous(), scaling)
    return weight, dequantise(found).double()


def slack(wanted: Tensor) -> float:
    """Tensor cores keep fewer bits of a sum of FP8 products than fp32 has."""
    return 2e-4 if DEVICE.type == "cpu" else 3e-3 * float(wanted.abs().max())


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-4, atol=slack(wanted))


@each_scaling
def test_rows_are_cast_as_the_trainer_casts_them(scaling: Scaling) -> None:
    x_BK, norm_K = drawn(3, 300), drawn(300, seed=1)
    x_BK[0, 128:256] = 0.0
    x_BK[1] *= 1e-30
    x_BK[2, :7] = torch.tensor([1e-3, -(2.0**-9), 1e4, 2.0**-130, -3e4, 0.3, -0.0], device=DEVICE)
    wanted = rows_of(x_BK, scaling)
    found = fp8_rows.cast_rows(x_BK, scaling)
    assert torch.equal(found.values_BK.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(found.scales_GB, wanted.scales.t())
    # More blocks than a program casts.
    long_BK = drawn(2, 9 * 128 + 16, seed=3)
    wanted, found = rows_of(long_BK, scaling), fp8_rows.cast_rows(long_BK, scaling)
    assert torch.equal(found.values_BK.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(found.scales_GB, wanted.scales.t())
    sum_BK = x_BK.clone()
    added_BK = drawn(3, 300, seed=2)
    found = fp8_rows.cast_normed(sum_BK, added_BK, norm_K, scaling, eps=EPS)
    assert torch.equal(sum_BK, x_BK + added_BK)
    back = dequantise(Quantised(found.values_BK, found.scales_GB.t(), wanted.block))
    # A last bit of the norm can move a number to its neighbour.
    step = 2.0**-3 * back.abs() + found.scales_GB.amax() * 2.0**-8
    assert ((back - normed(x_BK + added_BK, norm_K)).abs() <= step).all()


@pytest.mark.parametrize("scaling", SCALINGS[::2], ids=IDS[::2])
def test_narrow_products_of_e4m3_numbers(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    x_BD, norm_D, bias_O = drawn(2, 160), drawn(160, seed=1), drawn(16, seed=2)
    weight, weight_OD = weight_of(drawn(16, 160, seed=3), scaling)
    rows_BD = seen(normed(x_BD, norm_D), scaling)
    wanted_BO = rows_BD @ weight_OD.T + bias_O.double()
    near(fp8_narrow.into_heads(x_BD, norm_D, weight, bias_O, eps=EPS), wanted_BO)
    # Squares of gate and up lie side by side.
    size = 128 if scaling.is_blockwise else 8
    both, both_OD = weight_of(drawn(2 * size, 160, seed=4), scaling)
    gate_BI, up_BI = (rows_BD[:1] @ both_OD.T).split(size, dim=1)
    wanted_BI = functional.silu(gate_BI) * up_BI
    near(fp8_narrow.gated(x_BD[:1], norm_D, both, eps=EPS), wanted_BI)
    # More inputs than a chunk has.
    inputs_BK = drawn(2, 9 * 128 + 80, seed=5)
    down, down_DK = weight_of(drawn(16, inputs_BK.shape[1], seed=6), scaling)
    start_BD = drawn(2, 16, seed=7)
    wanted_BD = start_BD.double() + seen(inputs_BK, scaling) @ down_DK.T
    sum_BD = start_BD.clone()
    fp8_narrow.added(sum_BD, inputs_BK, down)
    near(sum_BD, wanted_BD)
    # Long rows are cast before.
    monkeypatch.setattr(fp8_narrow, "_MAX_REPEATED", 0)
    near(fp8_narrow.into_heads(x_BD, norm_D, weight, bias_O, eps=EPS), wanted_BO)
    near(fp8_narrow.gated(x_BD[:1], norm_D, both, eps=EPS), wanted_BI)
    sum_BD = start_BD.clone()
    fp8_narrow.added(sum_BD, inputs_BK, down)
    near(sum_BD, wanted_BD)


@pytest.mark.parametrize("scaling", SCALINGS[::2], ids=IDS[::2])
@pytest.mark.parametrize("shares", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tiled_products_of_e4m3_numbers(scaling: Scaling, shares: int) -> None:
    x_BK, bias_O = drawn(21, 384), drawn(72, seed=2)
    weight, weight_OK = weight_of(drawn(72, 384, seed=3), scaling)
    rows, scratch = fp8_rows.cast_rows(x_BK, scaling), products.Scratch(DEVICE)
    tiles = fp8_products.Tiles(16, shares=shares)
    found = fp8_products.product(rows, weight, bias_O, scratch, dtype=torch.float32, tiles=tiles)
    near(found, seen(x_BK, scaling) @ weight_OK.T + bias_O.double())
    assert not scratch.arrived.any()


@each_scaling
def test_gates_of_e4m3_numbers_are_cast_for_the_next_product(scaling: Scaling) -> None:
    x_BK = drawn(19, 160)
    both, both_OK = weight_of(drawn(256, 160, seed=4), scaling)
    gate_BI, up_BI = (seen(x_BK, scaling) @ both_OK.T).split(128, dim=1)
    wanted_BI = (functional.silu(gate_BI) * up_BI).float()
    found = fp8_products.gated(fp8_rows.cast_rows(x_BK, scaling), both, dtype=torch.float32)
    if isinstance(found, Tensor):
        assert not scaling.is_blockwise
        near(found, wanted_BI)
        return
    back_BI = dequantise(Quantised(found.values_BK, found.scales_GB.t(), (1, 128))).double()
    # A last bit of a sum can move a number to its neighbour.
    limit_BI = 0.13 * wanted_BI.abs() + 5 * slack(wanted_BI)
    assert ((back_BI - seen(wanted_BI, scaling)).abs() <= limit_BI).all()
    near(back_BI.mean(), seen(wanted_BI, scaling).mean())


@pytest.mark.parametrize("scaling", SCALINGS[::2], ids=IDS[::2])
def test_fixed_tiles_give_a_row_the_same_bits_whatever_rows_are_beside_it(scaling: Scaling) -> None:
    x_MK, num_rows = drawn(140, 256), 140
    weight, weight_OK = weight_of(drawn(128, 256, seed=1), scaling)
    scales = weight.scales if scaling.is_blockwise else weight.scales[:, None]

    def product(rows_MK: Tensor, tile=None) -> Tensor:
        found = rows_of(rows_MK, scaling)
        row_scales = found.scales.t().contiguous() if scaling.is_blockwise else found.scales
        how = {"num_rows": len(rows_MK), "is_blockwise": scaling.is_blockwise, "tile": tile}
        return scaled_product(found.values, row_scales, weight.values_OK, scales, **how)

    whole_MO = product(x_MK)
    wanted_MO = seen(x_MK, scaling) @ weight_OK.T
    torch.testing.assert_close(whole_MO.double(), wanted_MO, rtol=1e-2, atol=1e-2)
    for part in (slice(3, 4), slice(100, num_rows)):
        assert torch.equal(product(x_MK[part]), whole_MO[part])
    few_MO = product(x_MK, FEW)
    torch.testing.assert_close(few_MO, product(x_MK, MANY), rtol=1e-2, atol=1e-2)


# ---- the engine --------------------------------------------------------------------------------


def model() -> Decoder:
    config = decoder_config(
        {
            "model_type": "qwen2",
            "vocab_size": 60,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "rms_norm_eps": EPS,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        }
    )
    torch.manual_seed(0)
    made = Decoder(config, kernel="sdpa")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.to(DEVICE)
    lay_side_by_side(made)
    return made


def engine(made: Decoder, how: str, kv_cache_dtype: str = "auto", **fp8: str) -> NativeEngine:
    return NativeEngine(
        made,
        NativeEngineConfig(decode=how, max_concurrency=6, kv_cache_dtype=kv_cache_dtype),
        device=DEVICE,
        max_tokens=40,
        decode=None,
        chunk_bytes=1 << 16,
        fp8=Fp8Config(**fp8) if fp8 else None,
    )


def requests(count: int, new_tokens: int) -> list[Request]:
    sampling = Sampling(max_new_tokens=new_tokens)
    return [Request(str(n), np.arange(3 + n), sampling, seed=0) for n in range(count)]


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_scales_of_maps_that_share_a_weight_lie_where_cublas_reads_them(recipe: str) -> None:
    """At addresses that divide by 16 bytes: of each map apart, not only of the first."""
    running = engine(model(), "plain", recipe=recipe)
    found = fp8_maps(*running.runner.model.layers[0].self_attn.into_heads)
    assert found is not None
    places = [place.scales for place in found._places]
    running.close()
    assert len(places) == 3
    assert all(scales is not None and scales.data_ptr() % 16 == 0 for scales in places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "num_rows"),
    [("blockwise", 5), ("blockwise", 1), ("rowwise", 5), ("tensorwise", 1)],
)
def test_an_fp8_engine_samples_what_its_plain_path_samples(recipe: str, num_rows: int) -> None:
    """Before and after the weights change."""
    made = model()
    fused, plain = engine(made, "fused", recipe=recipe), engine(made, "plain", recipe=recipe)
    forward = fused.bursts.steps.forward
    assert all(map(all, forward._halves))
    for version in (1, 2):
        wanted = generate(plain, requests(num_rows, 2), timeout_s=100)
        found = generate(fused, requests(num_rows, 2), timeout_s=300)
        pairs = list(zip(found, wanted, strict=True))
        same = [pair for pair in pairs if np.array_equal(pair[0].tokens_T, pair[1].tokens_T)]
        # On a GPU a number that is drawn between two tokens may fall to the other one.
        assert len(same) >= len(pairs) - (0 if DEVICE.type == "cpu" else num_rows // 5)
        for one, other in same:
            np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=SAMPLED)
        for one in (fused, plain):
            one.begin_update(Quiesce.DRAIN)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(-1.1)
        for one in (fused, plain):
            one.commit(version)


def test_an_fp8_cache_is_read_and_written_alike_by_kernels_and_torch() -> None:
    made, asked = model(), requests(2, 3)
    engines = [
        engine(made, how, kind)
        for how, kind in (("fused", "fp8"), ("plain", "fp8"), ("plain", "auto"))
    ]
    # The wide maps are fewer programs to interpret.
    engines[0].bursts.steps.forward.can_be_narrow = False
    engines[0].bursts.steps.forward.can_be_tiled = False
    found, wanted, exact = (generate(one, asked, timeout_s=300) for one in engines)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=1e-4)
    pairs = zip(found, exact, strict=True)
    gaps = [np.abs(one.engine_logp_T - other.engine_logp_T)[1:] for one, other in pairs]
    assert np.concatenate(gaps).max() > 0
