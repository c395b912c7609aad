"""The kernels of the invariant numerics: right to rounding, and every row by itself.

They run as tests/kernels/test_kernels.py says. Equal bits mean less in the interpreter than on a
GPU, where programs are compiled: tests/gpu/test_gpu_invariant.py asks there for more.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, SIZES
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.ops import kernels
from homeostat.ops.attention import Limits, PackedLayout, packed_attention
from homeostat.ops.kernels.products import Tile, half_tiles, product, tile_of
from homeostat.ops.linear import linear, tiled_product
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.tiled_attention import TiledAttention, TilePlan, tiled_attention
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.cuda.invariant import InvariantForward
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, TokenRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)

# The interpreter takes the bits of bf16 operands of a product for integers.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
NEAR = {torch.float32: 1e-5, HALF: 2**-8 if DEVICE.type == "cuda" else 2**-10}

HALF_TILES = half_tiles()


def drawn(*sizes: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)


def assert_near(found: Tensor, wanted: Tensor, limit: float) -> None:
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=limit * scale)


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(37, 1), (5, 150), pytest.param(64, 128, marks=pytest.mark.slow)],
)
def test_a_product_equals_float64(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    x, weight = drawn(131, inputs, seed=0, dtype=dtype), drawn(outputs, inputs, seed=1, dtype=dtype)
    bias = drawn(outputs, seed=2, dtype=dtype)
    want = functional.linear(x.double(), weight.double(), bias.double())
    found = tiled_product(x, weight, bias)
    assert found.dtype == dtype
    assert_near(found, want, NEAR[dtype])
    wide = tiled_product(x, weight, out_dtype=torch.float32)
    assert_near(wide, want - bias.double(), 1e-5)


@pytest.mark.parametrize("dtype", list(NEAR))
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = drawn(140, 50, seed=0, dtype=dtype), drawn(70, 50, seed=1, dtype=dtype)
    whole = tiled_product(x, weight)
    for rows in ([77], [3, 139], list(range(1, 130)), list(range(139, -1, -1))):
        assert torch.equal(tiled_product(x[rows], weight), whole[rows]), rows
    # A view that begins at no multiple of 16 bytes.
    assert torch.equal(tiled_product(x[3:], weight), whole[3:])


def test_tiles_are_as_high_as_the_rows_and_small_where_there_is_little_to_do() -> None:
    def height(num_rows: int, num_outputs: int) -> int:
        return tile_of(num_rows, num_outputs, HALF).rows

    assert [height(rows, 150_000) for rows in (1, 16, 17, 33, 65, 9000)] == [
        16,
        16,
        32,
        64,
        128,
        128,
    ]
    assert [height(rows, 896) for rows in (16, 32, 64, 256, 512, 9000)] == [16, 32, 32, 32, 32, 128]


@pytest.mark.parametrize("tile", HALF_TILES)
def test_every_tile_is_the_same_product(tile: Tile) -> None:
    """With rows, outputs and inputs that fill no tile."""
    x, weight = drawn(tile.rows + 3, 150, seed=0, dtype=HALF), drawn(70, 150, seed=1, dtype=HALF)
    bias = drawn(70, seed=2, dtype=HALF)
    found = product(x, weight, bias, out_dtype=torch.float32, tile=tile)
    assert_near(found, functional.linear(x.double(), weight.double(), bias.double()), 1e-5)


def test_a_linear_map_and_its_gradients_are_those_of_the_plain_one() -> None:
    leaves = [drawn(9, 24, seed=0), drawn(40, 24, seed=1), drawn(40, seed=2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def results() -> list[Tensor]:
        out = linear(*leaves, numerics="invariant")
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().cos())]

    found = results()
    with kernels.plain():
        wanted = results()
    for ours, plain in zip(found, wanted, strict=True):
        assert_near(ours, plain, 1e-5)


def qkv(num_tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = (heads[0], heads[1], heads[1])
    return [drawn(num_tokens, size, dim, seed=at, dtype=dtype) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "limits"),
    [
        pytest.param((3, 3), 16, torch.float32, Limits(), marks=pytest.mark.slow),
        ((6, 2), 12, torch.float32, Limits()),
        ((2, 1), 12, torch.float32, Limits(5, 2.0)),
        pytest.param((2, 1), 12, torch.float32, Limits(66), marks=pytest.mark.slow),
        pytest.param((7, 1), 32, HALF, Limits(), marks=pytest.mark.slow),
        ((32, 1), 20, HALF, Limits()),
    ],
)
def test_attention_equals_float64(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, limits: Limits
) -> None:
    layout = PackedLayout.of([5, 70, 1, 8], DEVICE)
    tensors = qkv(layout.num_tokens, heads, dim, dtype)
    how = {"scale": 0.3, "limits": limits}
    out = TiledAttention.of(layout, num_kv_heads=heads[1]).attend(0, *tensors, **how)
    wide = [x.double() for x in tensors]
    with kernels.plain():
        want = packed_attention(*wide, layout, kernel="eager", **how)
    assert_near(out, want, 1.5 * NEAR[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("limits", [Limits(), Limits(6, 1.5), Limits(66)])
def test_a_query_has_the_same_bits_in_training_prefill_and_decoding(
    limits: Limits, dtype: torch.dtype
) -> None:
    """Rows of the store are shuffled, and hold NaN where no document has a key."""
    lengths, heads, dim = [70, 3, 20], (4, 2), 16
    layout = PackedLayout.of(lengths, DEVICE)
    q, k, v = qkv(layout.num_tokens, heads, dim, dtype)
    how = {"scale": 0.3, "limits": limits}
    whole = TiledAttention.of(layout, num_kv_heads=heads[1]).attend(0, q, k, v, **how)
    capacity = 80
    order = torch.randperm(3 * capacity, generator=torch.Generator().manual_seed(0))
    row_BT = order.view(3, capacity).to(DEVICE)
    store = torch.full((2, heads[1], 3 * capacity, dim), float("nan"), dtype=dtype, device=DEVICE)
    for row_T, length, at in zip(row_BT, lengths, layout.offsets, strict=True):
        span = slice(at, at + length)
        store[:, :, row_T[:length]] = torch.stack([k[span], v[span]]).transpose(1, 2)
    keys, values = store.flatten(1, 2)
    for ends in ((1, 1, 1), (9, 3, 8), (70, 3, 20)):
        for counts in ([1, 1, 1], [min(end, 5) for end in ends], ends):
            plan = TilePlan.of(
                torch.tensor(counts),
                torch.tensor(ends),
                row_BT,
                num_kv_heads=heads[1],
                head_stride=3 * capacity,
            )
            at = [
                offset + end - count + nth
                for offset, end, count in zip(layout.offsets, ends, counts, strict=True)
                for nth in range(count)
            ]
            out = tiled_attention(q[at], keys, values, plan, **how)
            assert torch.equal(out, whole[at]), (ends, counts)


# One chunk of the vocabulary; and one with a second, short one.
@pytest.mark.parametrize("num_words", [300, pytest.param(8200, marks=pytest.mark.slow)])
def test_log_probs_of_a_token_do_not_depend_on_the_others(num_words: int) -> None:
    hidden, weight = drawn(12, 24, seed=0), drawn(num_words, 24, seed=1)
    ends = [0, num_words - 9, num_words - 8, num_words - 1]
    targets = torch.tensor([*ends, *range(100, 108)], device=DEVICE)

    def scores(rows: list[int], chunk_bytes: int) -> Tensor:
        both = token_logprobs_and_entropy(
            hidden[rows],
            weight,
            targets[rows],
            temperature=0.7,
            chunk_bytes=chunk_bytes,
            entropy_grad=False,
            numerics="invariant",
        )
        return torch.stack(both)

    whole = scores(list(range(12)), 2**20)
    for rows in ([3], list(range(11, 2, -1))):
        assert torch.equal(scores(rows, 2**18), whole[:, rows]), rows
    with kernels.plain():
        assert_near(whole, scores(list(range(12)), 2**20), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_decoder_learns_the_same_with_kernels_and_without(family: str) -> None:
    decoder = Decoder(
        decoder_config({**SIZES, **FAMILIES[family]}), kernel="sdpa", numerics="invariant"
    ).to(DEVICE)
    tokens_N = torch.randint(0, decoder.config.vocab_size, (13,), device=DEVICE)
    positions_N = torch.cat([torch.arange(8), torch.arange(5)]).to(DEVICE)
    layout = PackedLayout.of([8, 5], DEVICE)

    def learned() -> list[Tensor]:
        decoder.zero_grad()
        hidden_ND = decoder.hidden(tokens_N, positions_N, layout)
        head, targets_N = decoder.output_weight(), tokens_N.roll(-1)
        logp_N = token_logprobs(hidden_ND, head, targets_N, chunk_bytes=2**20, numerics="invariant")
        logp_N.mean().backward()
        return [logp_N.detach(), *(parameter.grad for parameter in decoder.parameters())]

    found = learned()
    alone_N = decoder.hidden(tokens_N[8:], positions_N[8:], PackedLayout.of([5], DEVICE))
    together_N = decoder.hidden(tokens_N, positions_N, layout)
    assert torch.equal(alone_N, together_N[8:])
    if DEVICE.type == "cpu":
        with kernels.plain():
            wanted = learned()
        for ours, plain in zip(found, wanted, strict=True):
            assert_near(ours, plain, 3e-5)


def decoder() -> Decoder:
    torch.manual_seed(0)
    config = decoder_config({**SIZES, **FAMILIES["qwen3"], "num_hidden_layers": 1})
    return Decoder(config, kernel="sdpa", numerics="invariant").to(DEVICE)


Group = tuple[int, float, int]
# Prompts (tokens, temperature, new tokens) that begin a tile of keys, end one, and go over its end.
ONE: tuple[Group, ...] = ((3, 1.0, 2),)
GROUPS: tuple[Group, ...] = ((3, 1.0, 5), (60, 0.7, 6), (63, 0.0, 2))


def sampled(
    made: Decoder, how: str, wanted: list[Request], *, max_concurrency: int
) -> tuple[NativeEngine, list[Completion]]:
    config = NativeEngineConfig(decode=how, max_concurrency=max_concurrency)
    place = {"device": DEVICE, "max_tokens": 100, "decode": None, "chunk_bytes": 1 << 20}
    engine = NativeEngine(made, config, **place)
    return engine, generate(engine, wanted, timeout_s=300)


def requests(vocabulary: int, groups: tuple[Group, ...]) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            id=str(number),
            tokens_T=rng.integers(0, vocabulary, length),
            sampling=Sampling(max_new_tokens=new, temperature=temperature),
            seed=0,
        )
        for number, (length, temperature, new) in enumerate(groups)
    ]


@pytest.mark.parametrize(
    "groups", [ONE, pytest.param(GROUPS, marks=pytest.mark.slow)], ids=["one", "more"]
)
def test_bursts_have_the_bits_of_the_plain_engine_and_of_scoring(
    groups: tuple[Group, ...],
) -> None:
    made = decoder()
    asked = requests(made.config.vocab_size, groups)
    engine, found = sampled(made, "fused", asked, max_concurrency=3)
    assert isinstance(engine.bursts.steps.forward, InvariantForward)
    _, wanted = sampled(made, "plain", asked, max_concurrency=2)
    for request, one, other in zip(asked, found, wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.engine_logp_T.tolist() == other.engine_logp_T.tolist()
        whole_T = np.concatenate([request.tokens_T, one.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= len(request.tokens_T)).astype(np.float32)
        temperature = request.sampling.temperature or 1.0
        scored = engine.score([TokenRow(0, whole_T, is_new_T)], temperature=temperature)
        assert scored[0].tolist() == one.engine_logp_T.tolist()
