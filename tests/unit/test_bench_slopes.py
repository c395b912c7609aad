"""Slopes and bends of measured times; floors that are computed and not measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from homeostat.ops.attention import PackedLayout

BENCH = Path(__file__).resolve().parents[2] / "bench"
SIZES = [1, 2, 4, 8, 16, 32, 64]


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.7])
def test_a_power_law_has_its_exponent_and_no_bend(exponent: float) -> None:
    from slopes import growth

    noise = np.random.default_rng(0).normal(1.0, 0.01, len(SIZES))
    found = growth(SIZES, [3.0 * size**exponent * n for size, n in zip(SIZES, noise, strict=True)])
    assert found.slope == pytest.approx(exponent, abs=0.03)
    assert found.bend is None


def test_a_fixed_cost_bends_where_the_work_overtakes_it() -> None:
    from slopes import growth

    found = growth(SIZES, [max(8.0, size) for size in SIZES])
    assert found.bend is not None
    at, below, above = found.bend
    assert at == 8
    assert below == pytest.approx(0.0, abs=1e-6)
    assert above == pytest.approx(1.0, abs=1e-6)


def test_two_points_have_a_slope_and_no_bend() -> None:
    from slopes import growth

    found = growth([1, 4], [1.0, 2.0])
    assert found.slope == pytest.approx(0.5)
    assert found.to_json()["bend"] is None


def test_the_floor_of_the_half_billion_step() -> None:
    """The step of the claim: about 0.25 s of bytes and 0.5 s of arithmetic on one H200."""
    import floor
    from shapes import SHAPES

    shape, dtype = SHAPES["0.5b"], torch.bfloat16
    rates = floor.Rates(copy_bytes_per_s=4.2e12, matmul_flops=790e12)
    assert shape.weight_bytes(dtype) == pytest.approx(0.988e9, rel=0.01)
    assert shape.token_bytes(dtype) == 12_288
    generate_s = floor.generate_seconds(shape, dtype, rates, batch=256, prompt=64, new=512)
    assert generate_s == pytest.approx(0.243, rel=0.02)
    flops = floor.train_flops(shape, groups=32, samples=8, prompt=64, new=512)
    assert flops / rates.matmul_flops == pytest.approx(0.52, rel=0.05)


def test_a_shape_counts_the_weights_that_the_decoder_has() -> None:
    from shapes import SHAPES

    for shape in SHAPES.values():
        counted = shape.body_params + shape.head_params
        norms_and_biases = shape.decoder(torch.bfloat16).num_active_params - counted
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        # A Qwen3-MoE has norms of queries and keys in place of Qwen2's biases.
        own = 2 * shape.head_dim if shape.experts else width
        assert norms_and_biases == shape.layers * (own + 2 * shape.hidden) + shape.hidden


def test_the_end_token_is_never_sampled() -> None:
    """Both sides of a comparison then sample equally many tokens."""
    from shapes import END_ID, SHAPES, random_decoder

    shape = SHAPES["tiny"]
    model = random_decoder(shape, device=torch.device("cpu"), dtype=torch.float32)
    tokens_N = torch.arange(2, 66)
    with torch.no_grad():
        hidden_ND = model.hidden(
            tokens_N, torch.arange(64), PackedLayout.of([64], torch.device("cpu"))
        )
        logp_NV = torch.log_softmax(hidden_ND @ model.output_weight().T, -1)
    assert logp_NV[:, END_ID].max() < -30
    others_NV = torch.cat([logp_NV[:, :END_ID], logp_NV[:, END_ID + 1 :]], 1)
    assert others_NV.min() > -20
