"""Decoding's kernels against float64, and an engine that uses them against the plain one.

On a GPU, or in Triton's interpreter (tests/unit/test_ops_kernels.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.cuda import narrow, products, rows
from homeostat.rollout.native.cuda.attention import (
    AttentionScratch,
    AttentionShape,
    decode_attention,
    shares_for,
)
from homeostat.rollout.native.cuda.sampling import draw_from_hidden, draw_from_logits
from homeostat.rollout.native.cuda.state import DecodeState
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, StopReason

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
EPS = 1e-6
# On a GPU, drawing multiplies in 16 bits alone.
MULTIPLIED = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-5, atol=2e-5)


# ---- rows and narrow maps ----------------------------------------------------------------------


def test_a_sum_and_its_norm() -> None:
    x_BD, added_BD, weight_D = drawn(3, 33), drawn(3, 33, seed=1), drawn(33, seed=2)
    kept_BD = x_BD.clone()
    out_BD = rows.add_norm(x_BD, added_BD, weight_D, eps=EPS)
    near(x_BD, kept_BD + added_BD)
    near(out_BD, normed((kept_BD + added_BD).double(), weight_D.double()))
    near(rows.add_norm(kept_BD, None, weight_D, eps=EPS), normed(kept_BD, weight_D))


def test_gating_of_rows_that_lie_apart() -> None:
    both_BI = drawn(2, 80)
    gate_BI, up_BI = both_BI.split(40, dim=1)
    near(rows.gate(gate_BI, up_BI), functional.silu(gate_BI.double()) * up_BI.double())


def test_entering_looks_up_tokens_and_turns_positions() -> None:
    table_VD, frequencies_F = drawn(20, 24), drawn(6, seed=1).abs()
    tokens_B = torch.tensor([3, 19], dtype=torch.int32, device=DEVICE)
    positions_B = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
    x_BD, cos_BF, sin_BF = rows.enter(tokens_B, positions_B, table_VD, frequencies_F, 1.5)
    angles_BF = positions_B[:, None].double() * frequencies_F.double()
    assert torch.equal(x_BD, table_VD[tokens_B.long()])
    near(cos_BF, 1.5 * angles_BF.cos())
    near(sin_BF, 1.5 * angles_BF.sin())


@pytest.mark.parametrize("has_bias", [True, False])
def test_narrow_heads(has_bias: bool) -> None:
    x_BD, norm_D = drawn(2, 24), drawn(24, seed=1)
    weights = tuple(drawn(size, 24, seed=size) for size in (16, 8, 8))
    biases = tuple(drawn(size, seed=size + 1) for size in (16, 8, 8)) if has_bias else None
    found = narrow.into_heads(x_BD, norm_D, narrow.HeadMaps(weights, biases), eps=EPS)
    for index, out in enumerate(found):
        wanted = normed(x_BD.double(), norm_D.double()) @ weights[index].double().T
        near(out, wanted if biases is None else wanted + biases[index].double())


def test_narrow_gate_and_sum() -> None:
    x_BD, norm_D = drawn(2, 24), drawn(24, seed=1)
    gate_ID, up_ID = drawn(10, 24, seed=2), drawn(10, 24, seed=3)
    wanted = normed(x_BD, norm_D).double()
    found = narrow.gated(x_BD, norm_D, gate_ID, up_ID, eps=EPS)
    near(found, functional.silu(wanted @ gate_ID.double().T) * (wanted @ up_ID.double().T))
    # More inputs than are multiplied at a time.
    inputs_BK, weight_DK = drawn(2, narrow.INPUTS + 40, seed=4), drawn(6, narrow.INPUTS + 40)
    sum_BD = drawn(2, 6, seed=5)
    wanted = sum_BD.double() + inputs_BK.double() @ weight_DK.double().T
    narrow.added(sum_BD, inputs_BK, weight_DK)
    torch.testing.assert_close(sum_BD.double(), wanted, rtol=1e-4, atol=1e-4)


# ---- products ----------------------------------------------------------------------------------


def scaled_rows(x_BD: Tensor, norm_D: Tensor) -> products.Scaled:
    """Of squares, as many tiles as make padding."""
    squares_BT = torch.stack([part.square().sum(1) for part in x_BD.split(10, dim=1)], 1)
    return products.Scaled(x_BD * norm_D, squares_BT.contiguous())


@pytest.mark.parametrize("has_bias", [True, False])
def test_heads_of_rows_that_fill_no_tile(has_bias: bool) -> None:
    x_BD, norm_D, weight_OD = drawn(21, 28), drawn(28, seed=1), drawn(70, 28, seed=2)
    bias_O = drawn(70, seed=3) if has_bias else None
    wanted = normed(x_BD.double(), norm_D.double()) @ weight_OD.double().T
    wanted = wanted if bias_O is None else wanted + bias_O.double()
    near(products.into_heads(scaled_rows(x_BD, norm_D), weight_OD, bias_O, eps=EPS), wanted)
    normed_already = products.Scaled(normed(x_BD, norm_D))
    near(products.into_heads(normed_already, weight_OD, bias_O, eps=EPS), wanted)


def test_gates_of_rows_that_fill_no_tile() -> None:
    x_BD, norm_D, weight_OD = drawn(19, 28), drawn(28, seed=1), drawn(140, 28, seed=2)
    gate_BI, up_BI = (normed(x_BD, norm_D).double() @ weight_OD.double().T).split(70, dim=1)
    found = products.gated(scaled_rows(x_BD, norm_D), weight_OD, eps=EPS)
    near(found, functional.silu(gate_BI) * up_BI)


@pytest.mark.parametrize("num_inputs", [40, pytest.param(2052, marks=pytest.mark.slow)])
def test_a_sum_with_what_the_next_norm_needs(num_inputs: int) -> None:
    """Long sums are shared out, and leave nothing behind."""
    inputs_BK, weight_OK = drawn(18, num_inputs), drawn(70, num_inputs, seed=1)
    assert products.tiles_for(18, weight_OK).shares == (1 if num_inputs < 2048 else 4)
    x_BO, norm_O = drawn(18, 70, seed=2), drawn(70, seed=3)
    scratch = products.Scratch(DEVICE)
    wanted = x_BO.double() + 2 * inputs_BK.double() @ weight_OK.double().T
    for _ in range(2):
        scaled = products.added(x_BO, inputs_BK, weight_OK, norm_O, scratch)
    torch.testing.assert_close(x_BO.double(), wanted, rtol=1e-4, atol=1e-4)
    near(scaled.rows_BD, x_BO * norm_O)
    assert scaled.squares_BT is not None
    torch.testing.assert_close(scaled.squares_BT.sum(1), x_BO.square().sum(1))
    assert not scratch.arrived.any()


def test_tiles_fit_the_room_for_their_sums() -> None:
    scratch = products.Scratch(DEVICE)
    for num_outputs in (64, 896, 1536, 4096):
        weight_OK = torch.empty(num_outputs, 8192, device="meta")
        for num_rows in (5, 16, 33, 100, 256):
            tiles = products.tiles_for(num_rows, weight_OK)
            programs = int(np.prod(tiles.grid(num_rows, num_outputs)))
            size = programs * tiles.rows * products.OUTPUTS
            is_room = programs <= len(scratch.arrived) and size <= len(scratch.sums)
            assert tiles.shares == 1 or is_room, (num_rows, num_outputs)


# ---- attention ---------------------------------------------------------------------------------


def attention_in_float64(
    qkv: Sequence[Tensor], turns: Sequence[Tensor], store: Tensor, tables_BK: Tensor, position: int
) -> Tensor:
    """[H, d] of one sequence, whose cached keys and values are gathered one by one."""
    (q_Hd, k_hd, v_hd), (cos_F, sin_F) = qkv, turns
    half = q_Hd.shape[1] // 2

    def turned(x: Tensor) -> Tensor:
        left, right = x[:, :half], x[:, half:]
        return torch.cat((left * cos_F - right * sin_F, right * cos_F + left * sin_F), 1)

    block_tokens = store.shape[3]
    places = [(int(tables_BK[n // block_tokens]), n % block_tokens) for n in range(position)]
    keys, values = (
        torch.stack([store[side, block, :, at] for block, at in places] + [last])
        for side, last in ((0, turned(k_hd)), (1, v_hd))
    )
    grouped = turned(q_Hd).unflatten(0, (k_hd.shape[0], -1))
    scores = torch.einsum("hgd,nhd->hgn", grouped, keys) * 0.2
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values).flatten(0, 1)


@pytest.mark.parametrize(
    ("heads", "positions", "shares"),
    [
        ((2, 1, 32), (0, 20, 70), 1),
        pytest.param((2, 1, 32), (0, 70, 150), 4, marks=pytest.mark.slow),
        pytest.param((6, 2, 64), (130, 5), 2, marks=pytest.mark.slow),
        pytest.param((2, 1, 128), (0, 70), 1, marks=pytest.mark.slow),
        ((2, 1, 128), (0, 70), 2),
        # More shares than are read at once, with tiles of 128 keys.
        ((2, 1, 32), (1200, 129), 16),
    ],
)
def test_attention_over_blocks(
    heads: tuple[int, int, int], positions: tuple[int, ...], shares: int
) -> None:
    num_heads, num_kv, head_dim = heads
    count, num_blocks = len(positions), max(positions) // 16 + 1
    store = drawn(2, count * num_blocks + 1, num_kv, 16, head_dim)
    tables_BK = 1 + torch.randperm(count * num_blocks).view(count, num_blocks).int()
    q, k, v = (
        drawn(count, n * head_dim, seed=n + i) for i, n in enumerate((num_heads, num_kv, num_kv))
    )
    cos_BF, sin_BF = drawn(count, head_dim // 2, seed=7), drawn(count, head_dim // 2, seed=8)
    before = store.double().clone()
    shape = AttentionShape(num_kv, num_heads // num_kv, head_dim, 16, EPS)
    scratch = AttentionScratch(shape, num_rows=count, shares=shares, device=DEVICE)
    for _ in range(2):
        found = decode_attention(
            q,
            k,
            v,
            norms=None,
            cos_BF=cos_BF,
            sin_BF=sin_BF,
            stores=torch.tensor([part.data_ptr() for part in store], device=DEVICE),
            tables_BK=tables_BK.to(DEVICE),
            positions_B=torch.tensor(positions, dtype=torch.int32, device=DEVICE),
            shape=shape,
            scratch=scratch,
            scale=0.2,
        )
    for row, position in enumerate(positions):
        qkv = [x[row].double().view(-1, head_dim) for x in (q, k, v)]
        turns = cos_BF[row].double(), sin_BF[row].double()
        wanted = attention_in_float64(qkv, turns, before, tables_BK[row], position)
        near(found[row], wanted.flatten())
    assert not scratch.arrived.any()


def test_keys_are_shared_out_until_the_device_is_busy() -> None:
    narrow, wide = AttentionShape(2, 7, 64, 16, EPS), AttentionShape(8, 4, 128, 16, EPS)
    short = {"max_keys": 2048}
    found = [shares_for(narrow, rows, **short) for rows in (1, 16, 64, 256, 1024)]
    assert found == [16, 16, 4, 1, 1]
    assert [shares_for(wide, rows, **short) for rows in (1, 8, 64)] == [16, 4, 1]
    # A long sequence is shared out over more programs.
    assert [shares_for(narrow, rows, max_keys=32768) for rows in (1, 8, 16)] == [32, 32, 16]


# ---- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_logits", [True, False])
def test_tokens_are_drawn_by_their_inverse_cdf_and_move_their_row(has_logits: bool) -> None:
    """Of logits in memory, or of hidden rows and the weights they are multiplied by."""
    count, width, vocabulary = 6, 72, 5000 if has_logits else 700
    state = DecodeState(max_rows=count, max_tokens=40, block_tokens=16, layers=1, device=DEVICE)
    hidden_BD = drawn(count, width).to(MULTIPLIED)
    weight_VD = (0.3 * drawn(vocabulary, width, seed=1)).to(MULTIPLIED)
    logits_BV = hidden_BD.float() @ weight_VD.float().t()
    temperatures = (1.0, 0.5, 2.0, 1.0, 1.0, 1.0)
    noise_B = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0 - 2.0**-52, 0.7], dtype=torch.float64)
    state.scale_B.copy_(torch.tensor([1 / t for t in temperatures]))
    state.greedy_B[3] = 1
    state.moves_B[:5] = 1
    state.positions_B.fill_(11)
    state.starts_B.fill_(9)
    state.noise_SB[2] = noise_B.to(DEVICE)
    if has_logits:
        draw_from_logits(logits_BV, state.rows(count))
    else:
        draw_from_hidden(hidden_BD, weight_VD, state.rows(count))
    tokens_B, logps_B = state.drawn_SB[2].long().cpu(), state.logps_SB[2].cpu()
    for row in range(count):
        z_V = (logits_BV[row].cpu() * state.scale_B[row].cpu()).double()
        cdf_V = z_V.softmax(0).cumsum(0)
        wanted = int(torch.searchsorted(cdf_V, float(noise_B[row]) * cdf_V[-1], right=True))
        wanted = int(z_V.argmax()) if row == 3 else wanted
        assert int(tokens_B[row]) == wanted
        near(logps_B[row], z_V.log_softmax(0)[wanted])
    assert state.positions_B.tolist() == [12] * 5 + [11]
    assert torch.equal(state.tokens_B.long().cpu(), tokens_B)


@pytest.mark.parametrize("has_logits", [True, False])
def test_logits_that_are_no_numbers_give_a_log_prob_that_is_none(has_logits: bool) -> None:
    state = DecodeState(max_rows=1, max_tokens=4, block_tokens=16, layers=1, device=DEVICE)
    state.scale_B.fill_(1.0)
    nans = torch.full((1, 56), torch.nan, device=DEVICE)
    if has_logits:
        draw_from_logits(nans, state.rows(1))
    else:
        draw_from_hidden(nans.to(MULTIPLIED), drawn(50, 56).to(MULTIPLIED), state.rows(1))
    assert torch.isnan(state.logps_SB[0, 0])
    assert 0 <= int(state.drawn_SB[0, 0]) < (56 if has_logits else 50)


# ---- the engine --------------------------------------------------------------------------------


def model(kind: str) -> Decoder:
    config = decoder_config(
        {
            "model_type": kind,
            "vocab_size": 60,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
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
    return made.to(DEVICE)


def engine(made: Decoder, how: str, *, max_concurrency: int = 6) -> NativeEngine:
    return NativeEngine(
        made,
        NativeEngineConfig(decode=how, max_concurrency=max_concurrency),
        device=DEVICE,
        max_tokens=100,
        decode=None,
        chunk_bytes=1 << 16,
    )


def go_wide(fused: NativeEngine) -> None:
    """The wide maps are fewer programs to interpret."""
    assert fused.bursts is not None
    fused.bursts.steps.forward.can_be_narrow = False
    fused.bursts.steps.forward.can_be_tiled = False


Group = tuple[int, float, int]
# A burst of tiles and one of the narrow maps; and longer ones, which stop at different times.
FEW: tuple[Group, ...] = ((3, 1.0, 2), (5, 0.0, 1))
GROUPS: tuple[Group, ...] = ((3, 1.0, 11), (20, 0.0, 3), (58, 0.7, 4))


def requests(*groups: Group, samples: int = 2, stops: tuple[int, ...] = (5, 12)) -> list[Request]:
    """Some for each group (prompt tokens, temperature, new tokens), which share a prompt."""
    rng = np.random.default_rng(0)
    return [
        Request(
            id=f"{index}/{sample}",
            tokens_T=tokens_T,
            sampling=Sampling(
                max_new_tokens=new, temperature=temperature, stop_ids=frozenset(stops)
            ),
            seed=0,
            session_key=str(index),
        )
        for index, (length, temperature, new) in enumerate(groups)
        for tokens_T in [rng.integers(0, 60, length)]
        for sample in range(samples)
    ]


def same(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.stop_reason == other.stop_reason
        np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=1e-5)


@pytest.mark.parametrize(
    "groups", [FEW, pytest.param(GROUPS, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_bursts_sample_what_the_plain_engine_samples(groups: tuple[Group, ...]) -> None:
    """Through tiles at first; the last ones go through the narrow maps."""
    made = model("qwen3")
    lay_side_by_side(made)
    wanted = generate(engine(made, "plain"), requests(*groups), timeout_s=100)
    if groups is GROUPS:
        assert {StopReason.STOP, StopReason.LENGTH} == {found.stop_reason for found in wanted}
    fused = engine(made, "fused")
    assert fused.bursts is not None
    # On a GPU tiles are of 16 bits; here all is fp32.
    assert fused.bursts.steps.forward.can_be_tiled == (DEVICE.type == "cpu")
    same(generate(fused, requests(*groups), timeout_s=300), wanted)
    assert fused.stats().new_tokens == sum(len(found.tokens_T) for found in wanted)


@pytest.mark.slow
def test_what_is_interrupted_goes_on_to_the_same_tokens() -> None:
    """Retracted with a burst on its way, asleep in between, weights of a new version: the same."""
    made = model("qwen2")
    long = requests((3, 1.0, 22), samples=1, stops=())
    wanted = generate(engine(made, "plain"), long, timeout_s=100)
    fused = engine(made, "fused")
    assert fused.bursts is not None
    go_wide(fused)
    for request in long:
        fused.submit(request)
    for _ in range(3):
        assert not fused.poll(timeout_s=0.0)
    assert fused.bursts.is_flying
    fused.begin_update(Quiesce.RETRACT)
    assert not fused.bursts.is_flying
    fused.commit(1)
    fused.sleep()
    fused.wake()
    found: list[Completion] = []
    while len(found) < len(long):
        found += fused.poll(timeout_s=100)
    same(sorted(found, key=lambda one: one.request_id), wanted)
    assert {segment.policy_version for one in found for segment in one.segments} == {0, 1}


@pytest.mark.slow
def test_a_cache_that_grows_and_runs_full() -> None:
    """Blocks for one sequence and a bit: the second one waits for the first, whose burst has the
    cache moved."""
    made = model("qwen2")
    two = requests((58, 0.7, 7))
    wanted = generate(engine(made, "plain"), two, timeout_s=100)
    fused = engine(made, "fused", max_concurrency=2)
    go_wide(fused)
    fused.room.max_tokens = 80
    fused.room.config = NativeEngineConfig(max_concurrency=1)
    same(generate(fused, two, timeout_s=300), wanted)
    assert fused.stats().max_running == 1
