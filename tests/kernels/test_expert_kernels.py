"""Kernels of layers with experts against the plain path: choice, weights, products, decoding.

They run as tests/kernels/test_kernels.py says.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from homeostat.columns import dense
from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.ops import kernels
from homeostat.ops.experts import experts_of
from homeostat.ops.kernels.grouped import cut_of, grouped_product, grouped_tiles
from homeostat.ops.kernels.pairs import max_tiles, tiles_of
from homeostat.ops.kernels.products import Tile
from homeostat.ops.linear import Numerics
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.pairs import Pairs, pairs_of
from homeostat.ops.routing import best_experts, expert_weights, router_logits, scores_of
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.cuda.experts import ExpertScratch, narrow_experts, wide_experts
from homeostat.rollout.native.cuda.forward import DecodeForward
from homeostat.rollout.native.cuda.state import DecodeState
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, TokenRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
# The interpreter takes the bits of bf16 operands of a product for integers.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# Of results that are rounded once.
LIMIT = torch.finfo(HALF).eps / 2
EPS = 1e-6


def drawn(*sizes: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)


def assert_near(found: Tensor, wanted: Tensor, limit: float) -> None:
    gap = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(gap) <= limit, float(gap)


# ---- choice ------------------------------------------------------------------------------------

QWEN = MoeShape(num_experts=11, top_k=3, expert_size=24, layers=(0,))
DEEPSEEK = MoeShape(
    num_experts=12,
    top_k=4,
    expert_size=24,
    layers=(0,),
    scoring="sigmoid",
    scaling=2.5,
    num_groups=3,
    num_groups_kept=2,
    has_bias=True,
)
BARE = replace(QWEN, normalised=False, top_k=1)


@pytest.mark.parametrize("shape", [QWEN, DEEPSEEK, BARE], ids=["qwen", "deepseek", "bare"])
def test_experts_are_chosen_and_weighed_as_in_the_plain_path(shape: MoeShape) -> None:
    """Equal scores go to the lower number, in and among groups."""
    logits_NE = (2 * drawn(60, shape.num_experts, seed=0)).round()
    bias_E = drawn(shape.num_experts, seed=1).round() / 4 if shape.has_bias else None
    upstream_NK = drawn(60, shape.top_k, seed=2)

    def results() -> tuple[Tensor, Tensor, Tensor]:
        scores_NE = scores_of(logits_NE, shape).requires_grad_()
        ids_NK = best_experts(scores_NE, bias_E, shape)
        weights_NK = expert_weights(scores_NE, ids_NK, shape)
        (grad_NE,) = torch.autograd.grad(weights_NK, scores_NE, upstream_NK)
        return ids_NK, weights_NK.detach(), grad_NE

    found = results()
    with kernels.plain():
        wanted = results()
    assert torch.equal(found[0], wanted[0])
    for ours, plain in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)


def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    scores_NE = torch.full((2, 11), torch.nan, device=DEVICE)
    assert best_experts(scores_NE, None, QWEN).tolist() == [[0, 1, 2]] * 2


def test_logits_of_a_bf16_router_are_fp32() -> None:
    x, weight = (drawn(9, 24, seed=0), drawn(7, 24, seed=1))
    leaves = [t.bfloat16().requires_grad_() for t in (x, weight)]
    logits = router_logits(*leaves, numerics="fast")
    grad = drawn(9, 7, seed=2)
    found = [logits.detach(), *torch.autograd.grad(logits, leaves, grad)]
    x, weight = (t.detach().double() for t in leaves)
    assert_near(found[0], x @ weight.T, 1e-6)
    # Rounded once, to bf16.
    assert_near(found[1], grad.double() @ weight, 2**-9)
    assert_near(found[2], grad.double().T @ x, 2**-9)


# ---- pairs and products ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(3, 2, 4), (90, 3, 5), (40, 1, 700)])
def test_pairs_lie_by_expert_and_by_token(size: tuple[int, int, int]) -> None:
    num_tokens, num_slots, num_experts = size
    rng = np.random.default_rng(0)
    ids = rng.integers(0, num_experts, (num_tokens, num_slots)) // 2 * 2
    ids_NK = torch.from_numpy(ids).to(DEVICE)
    pairs = pairs_of(ids_NK, num_experts, like=drawn(1, seed=0))
    order = np.argsort(ids.flatten(), kind="stable")
    assert pairs.order_S.tolist() == order.tolist()
    assert pairs.place_S.tolist() == np.argsort(order).tolist()
    ends = np.bincount(ids.flatten(), minlength=num_experts).cumsum()
    assert pairs.ends_E.tolist() == ends.tolist()
    for rows in (1, 16):
        expert_T, first_T, end_T = tiles_of(pairs.ends_E, ids.size, rows=rows).tolist()
        assert len(expert_T) == max_tiles(ids.size, num_experts, rows)
        covered: list[int] = []
        for expert, first, end in zip(expert_T, first_T, end_T, strict=True):
            if expert >= 0:
                assert end == ends[expert]
                covered += range(first, min(first + rows, end))
        assert covered == list(range(ids.size))


def some_pairs(num_tokens: int, num_slots: int, num_experts: int) -> Pairs:
    """The last expert has no tokens, the first one many."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.integers(0, 2 * num_experts, (num_tokens, num_slots)), num_experts - 2)
    ids_NK = torch.from_numpy(num_experts - 2 - ids).to(DEVICE)
    return pairs_of(ids_NK, num_experts, like=drawn(1, seed=0))


@pytest.mark.parametrize(
    "tile", [grouped_tiles()[0], pytest.param(grouped_tiles()[-1], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("num_slots", [0, 2])
def test_each_row_is_multiplied_by_its_experts_matrix(tile: Tile, num_slots: int) -> None:
    pairs = some_pairs(21, 2, 4)
    x = drawn(21 if num_slots else 42, 40, seed=0, dtype=HALF)
    weight_EOK = drawn(4, 70, 40, seed=1, dtype=HALF)
    cut = cut_of(pairs, like=x, tile=tile)
    found = grouped_product(x, weight_EOK, pairs, cut, num_slots=num_slots)
    rows = x[pairs.order_S // 2] if num_slots else x
    starts = [0, *pairs.ends_E.tolist()]
    for expert in range(4):
        own = slice(starts[expert], starts[expert + 1])
        if own.start < own.stop:
            assert_near(found[own], rows[own].double() @ weight_EOK[expert].double().T, LIMIT)


@pytest.mark.parametrize(
    ("numerics", "dtype"), [("fast", torch.float32), ("fast", HALF), ("invariant", HALF)]
)
def test_grouped_experts_and_their_gradients(numerics: Numerics, dtype: torch.dtype) -> None:
    num_tokens, num_slots, num_experts = 23, 3, 6
    leaves = [
        drawn(num_tokens, 32, seed=0, dtype=dtype),
        0.2 * drawn(num_experts, 48, 32, seed=1, dtype=dtype),
        0.2 * drawn(num_experts, 32, 24, seed=2, dtype=dtype),
    ]
    scores = drawn(num_tokens, num_experts, seed=3)
    scores[:, 2] = -9.0
    ids_NK = scores.topk(num_slots).indices
    weights_NK = drawn(num_tokens, num_slots, seed=4).abs()
    upstream = drawn(num_tokens, 32, seed=5)

    def results(kernel: str, to: torch.dtype) -> list[Tensor]:
        x, gate_up, down = (leaf.to(to).detach().requires_grad_() for leaf in leaves)
        weights = weights_NK.detach().requires_grad_()
        out = experts_of(x, ids_NK, weights, gate_up, down, numerics=numerics, kernel=kernel)
        grads = torch.autograd.grad(out, (x, weights, gate_up, down), upstream.to(to))
        return [out.detach(), *grads]

    with kernels.plain():
        wanted = results("plain", torch.float32)
    limit = 1e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for found, plain in zip(results("grouped", dtype), wanted, strict=True):
        assert_near(found, plain, limit)
    assert not results("grouped", dtype)[3][2].any(), "an expert without tokens has no gradient"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_token_has_the_same_bits_whatever_else_is_in_the_pass(dtype: torch.dtype) -> None:
    x, gate_up, down = (
        drawn(*size, seed=seed, dtype=dtype)
        for seed, size in enumerate(((20, 32), (5, 32, 32), (5, 32, 16)))
    )
    ids_NK = drawn(20, 5, seed=3).topk(2).indices
    weights_NK = drawn(20, 2, seed=4)

    def run(rows: list[int]) -> Tensor:
        return experts_of(
            x[rows],
            ids_NK[rows],
            weights_NK[rows],
            gate_up,
            down,
            numerics="invariant",
            kernel="grouped",
        )

    whole = run(list(range(20)))
    for rows in ([7], list(range(19, 3, -1))):
        assert torch.equal(run(rows), whole[rows]), rows


# ---- decoding ----------------------------------------------------------------------------------


def model(shape: str, *, numerics: Numerics = "fast") -> Decoder:
    kinds = {
        "qwen": {
            "model_type": "qwen3_moe",
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 6,
            "norm_topk_prob": True,
        },
        "dots": {
            "model_type": "dots1",
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
    }
    config = decoder_config(
        {
            "vocab_size": 60,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rms_norm_eps": EPS,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
            **kinds[shape],
        }
    )
    torch.manual_seed(0)
    made = Decoder(config, kernel="sdpa", numerics=numerics, grouped_kernel="grouped")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.to(DEVICE)


@pytest.mark.parametrize("kind", ["qwen", "dots"])
def test_a_decoding_step_of_experts(kind: str) -> None:
    """Narrow and wide: the plain block's result, and its routes noted under each row's step."""
    made = model(kind)
    block, shape = made.moe_blocks[-1], made.config.moe
    assert shape is not None
    count = 2
    state = DecodeState(
        max_rows=5, max_tokens=40, block_tokens=16, layers=2, device=DEVICE, moe=shape
    )
    state.positions_B[:2] = torch.tensor([4, 9])
    state.starts_B[:2] = torch.tensor([3, 4])
    x_BD, norm_D = drawn(count, 16, seed=0), drawn(16, seed=1)
    normed_BD = x_BD * (x_BD.square().mean(1, keepdim=True) + EPS).rsqrt() * norm_D
    with torch.no_grad(), kernels.plain():
        scores_BE = scores_of(block.gate.logits(normed_BD), shape)
        bias_E = block.gate.e_score_correction_bias
        ids_BK = best_experts(scores_BE, bias_E, shape)
        weights_BK = expert_weights(scores_BE, ids_BK, shape)
        wanted_BD = block.experts(normed_BD, ids_BK, weights_BK)
    scratch = ExpertScratch(shape.num_experts, max_rows=4, device=DEVICE)
    with torch.no_grad():
        found_BD = x_BD.clone()
        narrow_experts(found_BD, norm_D, block, state.rows(count), scratch, eps=EPS)
        assert_near(found_BD - x_BD, wanted_BD, 1e-5)
        assert not scratch.arrived_B.any()
        noted = [(state.routes_SBLK.clone(), state.shares_SBLK.clone())]
        state.routes_SBLK.zero_(), state.shares_SBLK.zero_()
        assert_near(wide_experts(normed_BD, block, state.rows(count)), wanted_BD, 1e-5)
        noted.append((state.routes_SBLK, state.shares_SBLK))
    for routes_SBLK, shares_SBLK in noted:
        for row, step in enumerate((1, 5)):
            at = step, row, block.number
            assert routes_SBLK[at].tolist() == ids_BK[row].tolist()
            assert_near(shares_SBLK[at], weights_BK[row], 1e-6)
            routes_SBLK[at], shares_SBLK[at] = 0, 0
        assert not routes_SBLK.any(), "nothing else was written"
        assert not shares_SBLK.any(), "nothing else was written"


def sampled(made: Decoder, how: str, asked: list[Request]) -> tuple[NativeEngine, list[Completion]]:
    engine = NativeEngine(
        made,
        NativeEngineConfig(decode=how, max_concurrency=6),
        device=DEVICE,
        max_tokens=100,
        decode=None,
        chunk_bytes=1 << 20,
    )
    return engine, generate(engine, asked, timeout_s=300)


Groups = tuple[tuple[int, int], ...]


def requests(*groups: tuple[int, int]) -> list[Request]:
    """Some for each (prompt tokens, new tokens)."""
    rng = np.random.default_rng(0)
    return [
        Request(
            str(number),
            rng.integers(0, 60, length),
            Sampling(new),
            seed=0,
            routed_experts=True,
            routed_weights=True,
        )
        for number, (length, new) in enumerate(groups)
    ]


def column(completion: Completion, name: str) -> np.ndarray:
    columns = [completion.prompt_columns, *(s.columns for s in completion.segments)]
    return np.concatenate([dense(one[name]) for one in columns])


def routes(completion: Completion) -> list[list[list[int]]]:
    return column(completion, "routed_experts").tolist()


# Narrow with one row; wide with six, and narrow when one of them is left.
@pytest.mark.parametrize(
    "groups",
    [
        ((2, 2),),
        pytest.param(((3, 2), (2, 1), (1, 4), (3, 1), (4, 1), (2, 1)), marks=pytest.mark.slow),
    ],
    ids=["few", "more"],
)
def test_bursts_sample_and_route_as_the_plain_engine_does(groups: Groups) -> None:
    made = model("dots")
    lay_side_by_side(made)
    asked = requests(*groups)
    engine, found = sampled(made, "fused", asked)
    assert isinstance(engine.bursts.steps.forward, DecodeForward)
    for one, other in zip(found, sampled(made, "plain", asked)[1], strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert routes(one) == routes(other)
        np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=1e-5)
        shares = (column(made, "routed_weights") for made in (one, other))
        np.testing.assert_allclose(*shares, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [((2, 2),), ((3, 3), (5, 2))])
def test_invariant_bursts_have_the_bits_of_the_plain_engine_and_of_scoring(groups: Groups) -> None:
    made = model("qwen", numerics="invariant")
    asked = requests(*groups)
    engine, found = sampled(made, "fused", asked)
    _, plain = sampled(made, "plain", asked)
    for request, one, other in zip(asked, found, plain, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.engine_logp_T.tolist() == other.engine_logp_T.tolist()
        assert routes(one) == routes(other)
        shares = [column(made, "routed_weights").tolist() for made in (one, other)]
        assert shares[0] == shares[1]
        whole_T = np.concatenate([request.tokens_T, one.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= len(request.tokens_T)).astype(np.float32)
        scored = engine.score([TokenRow(0, whole_T, is_new_T)], temperature=1.0)
        assert scored[0].tolist() == one.engine_logp_T.tolist()
