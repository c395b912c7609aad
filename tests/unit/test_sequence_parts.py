"""Parts of a micro-batch over ranks: who has which token, and attention joined from parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sequence_blocks import expected_halves, joined_halves, random_qkv

from homeostat.config.mesh import Mesh
from homeostat.errors import ModelError
from homeostat.models.decoder_shape import BlockForm
from homeostat.models.families import DecoderConfig, decoder_config
from homeostat.models.origin import ConfigOrigin
from homeostat.train.sequence.blocks import block_kernel
from homeostat.train.sequence.heads import repeats, require_heads, require_sequence
from homeostat.train.sequence.memory import exchanged_bytes, share_of
from homeostat.train.sequence.ring import RingLayout
from homeostat.train.sequence.split import part_of_distinct, part_of_rows
from homeostat.types import TokenRow, TrainBatch

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.booleans())
def test_every_token_is_on_one_rank(lengths: list[int], cp: int, sp: int, by_length: bool) -> None:
    lengths_B = np.array(lengths)
    parts = [
        part_of_rows(lengths_B, cp=(cp, c), sp=(sp, s), by_length=by_length)
        for c in range(cp)
        for s in range(sp)
    ]
    assert len({len(part.index_X) for part in parts}) == 1
    owners = np.stack([part.place_N >= 0 for part in parts])
    assert (owners.sum(axis=0) == 1).all()
    for part in parts:
        mine = np.flatnonzero(part.place_N >= 0)
        assert (part.index_X[part.place_N[mine]] == mine).all()
        assert int(part.is_own_X.sum()) == len(mine)
        assert (part.mine(np.arange(sum(lengths))) == mine).all()


def test_a_row_in_the_ring_is_an_early_and_a_late_chunk() -> None:
    # 13 tokens are 4 chunks of 4, with 3 copies of the last token at the end.
    lengths = np.array([13])
    first, second = (part_of_rows(lengths, cp=(2, place)) for place in (0, 1))
    assert first.index_X.tolist() == [0, 1, 2, 3, 12, 12, 12, 12]
    assert first.is_own_X.tolist() == [True] * 5 + [False] * 3
    assert second.index_X.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert first.chunks == second.chunks == (4,)


def test_rows_of_equal_length_are_neighbours_on_request() -> None:
    part = part_of_rows(np.array([3, 5, 3]), sp=(1, 0), by_length=True)
    assert part.index_X.tolist() == [0, 1, 2, 8, 9, 10, 3, 4, 5, 6, 7]


def test_copies_of_a_shared_prompt_are_where_it_is_computed() -> None:
    # Two rows of four tokens, of which the first two are the same.
    unique_U, place_N = np.array([0, 1, 2, 3, 6, 7]), np.array([0, 1, 2, 3, 0, 1, 4, 5])
    first, second = (part_of_distinct(unique_U, place_N, sp=(2, place)) for place in (0, 1))
    assert first.place_N.tolist() == [0, 1, 2, -1, 0, 1, -1, -1]
    assert second.place_N.tolist() == [-1, -1, -1, 0, -1, -1, 1, 2]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_to_parts_of_the_keys_joins_to_attention_to_all(kernel: str, heads: int) -> None:
    layout, scale = RingLayout.of((3, 5, 5), CPU), 0.4
    qkv = random_qkv(layout.whole.num_tokens, heads, seed=heads)
    dout = torch.randn(layout.half.num_tokens, heads, 8)
    out, lse, grads = joined_halves(
        block_kernel(kernel, device_type="cpu"), layout, qkv, dout, scale=scale
    )
    expected, wanted = expected_halves(layout, qkv, dout, scale=scale)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert lse.dtype == torch.float32
    for found, grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-5)


def test_key_heads_are_repeated_until_ranks_divide_them() -> None:
    assert [repeats(2, size) for size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [repeats(3, 2), repeats(6, 4), repeats(8, 4)] == [2, 2, 1]


def _shape() -> DecoderConfig:
    raw = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    return decoder_config(raw, origin=ConfigOrigin("config.json"))


def test_ranks_that_do_not_divide_the_heads_are_refused_with_the_arithmetic() -> None:
    require_heads(_shape(), 6)
    with pytest.raises(ModelError, match=r"12 query heads \(12 = 1 x 8 \+ 4\).*1, 2, 3, 4, 6, 12"):
        require_heads(_shape(), 8)


def test_windows_and_soft_caps_do_not_go_around_a_ring() -> None:
    shape = _shape()
    require_sequence(shape, Mesh(cp=2))
    for block, what in (
        (BlockForm(windows=(4, None)), "sliding windows"),
        (BlockForm(attention_cap=30.0), "soft-capped scores"),
    ):
        limited = replace(shape, block=block)
        require_sequence(limited, Mesh(sp=2))
        with pytest.raises(ModelError, match=rf"context_parallel_size is 2.*{what}"):
            require_sequence(limited, Mesh(cp=2))


def test_a_rank_is_estimated_by_its_part_and_what_it_exchanges() -> None:
    row = TokenRow(
        0,
        np.arange(10),
        np.ones(10, dtype=np.float32),
        {"advantage": np.arange(10, dtype=np.float32)},
    )
    part = share_of(TrainBatch.of([row, row]), 4)
    assert part.lengths_B.tolist() == [3, 3]
    assert part.columns["advantage"].tolist() == [0, 4, 8, 0, 4, 8]
    how = {"num_tokens": 10, "item_bytes": 2}
    assert exchanged_bytes(_shape(), Mesh(shard=4), **how) == 0
    # 12 query heads of 8; 2 key heads, sent twice each to 4 ranks.
    assert exchanged_bytes(_shape(), Mesh(sp=4), **how) == 10 * 2 * (3 * (96 + 2 * 32) + 2 * 96)
    assert exchanged_bytes(_shape(), Mesh(cp=2), **how) == 10 * (4 * 16 * 2 + 4 * (96 + 4 * 16))


def test_layouts_of_queries_and_keys_agree() -> None:
    layout = RingLayout.of((2, 3), CPU)
    assert layout.whole.lengths == (4, 6)
    assert layout.early_M.tolist() == [0, 1, 4, 5, 6]
    assert layout.late_M.tolist() == [2, 3, 7, 8, 9]
