"""Rows computed as a tree are the rows computed one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from homeostat.data.packing import pack_nested
from homeostat.ops import branches
from homeostat.ops.attention import Limits, PackedLayout, packed_attention
from homeostat.ops.branches import Branches
from homeostat.ops.sharing import SharedPrompts
from homeostat.types import TokenRow

CPU = torch.device("cpu")


def nested_rows(
    rng: np.random.Generator, *, texts: int = 2, anchors: tuple[int, ...] = (3, 5, 9), samples=2
) -> list[TokenRow]:
    """Blocks of two lengths behind prefixes of some texts."""
    rows = []
    for _ in range(texts):
        text_T = rng.integers(0, 50, 12)
        for anchor in anchors:
            for sample in range(samples):
                block_T = rng.integers(0, 50, 4 if sample else 2)
                tokens_T = np.concatenate([text_T[:anchor], block_T])
                weights_T = (np.arange(len(tokens_T)) >= anchor).astype(np.float32)
                rows.append(TokenRow(len(rows), tokens_T, weights_T))
    return rows


def parts_of(rows: list[TokenRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    prefixes_B = np.array([int(np.argmax(row.weights_T)) for row in rows])
    lengths_B = np.array([len(row) for row in rows])
    return np.concatenate([row.tokens_T for row in rows]), lengths_B, prefixes_B


def test_a_tree_has_every_distinct_token_once() -> None:
    rows = nested_rows(np.random.default_rng(0))
    rng = np.random.default_rng(1)
    rows = [rows[int(place)] for place in rng.permutation(len(rows))]
    tokens_N, lengths_B, prefixes_B = parts_of(rows)
    tree = Branches.find(tokens_N, lengths_B, prefixes_B, device=CPU)
    assert tree is not None
    assert tree.trunks.lengths == (9, 9)
    num_blocks = int((lengths_B - prefixes_B).sum())
    assert len(tree.unique_U) == len(torch.unique(tree.unique_U)) == 18 + num_blocks
    # Every token finds a copy of itself.
    assert (tokens_N[tree.unique_U.numpy()][tree.place_N.numpy()] == tokens_N).all()


def test_rows_that_share_whole_prompts_or_nothing_are_no_tree() -> None:
    rng = np.random.default_rng(2)
    same = nested_rows(rng, anchors=(6,), samples=4)
    parts = parts_of(same)
    assert Branches.find(*parts, device=CPU) is None
    assert SharedPrompts.find(*parts, device=CPU) is not None
    others = parts_of(nested_rows(rng, texts=5, anchors=(6,), samples=1))
    assert Branches.find(*others, device=CPU) is None


def test_prefixes_that_are_computed_in_other_ways_are_not_shared() -> None:
    tokens_N, lengths_B, prefixes_B = parts_of(nested_rows(np.random.default_rng(3)))
    routes_N = np.random.default_rng(4).integers(0, 9, (len(tokens_N), 2))
    found = Branches.find(tokens_N, lengths_B, prefixes_B, device=CPU, alike=[routes_N])
    assert found is None


@pytest.mark.parametrize("chunk", [branches.SCORE_BYTES, 1])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("limits", [Limits(), Limits(4, 1.5)])
def test_attention_and_its_gradient_are_those_of_the_rows(
    limits: Limits, heads: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "SCORE_BYTES", chunk)
    tokens_N, lengths_B, prefixes_B = parts_of(nested_rows(np.random.default_rng(5)))
    tree = Branches.find(tokens_N, lengths_B, prefixes_B, device=CPU)
    assert tree is not None
    torch.manual_seed(0)
    shapes = [(heads[0], 8), (heads[1], 8), (heads[1], 8)]
    made = [torch.randn(len(tree.unique_U), *shape, requires_grad=True) for shape in shapes]
    layout = PackedLayout.of(lengths_B.tolist(), CPU)
    attention = tree.attention(layout, kernel="sdpa", packed=lambda layout: None)  # type: ignore
    found_U = attention.attend(0, *made, scale=0.3, limits=limits)
    spread = [x.index_select(0, tree.place_N) for x in made]
    want_N = packed_attention(*spread, layout, scale=0.3, kernel="eager", limits=limits)
    torch.testing.assert_close(found_U[tree.place_N], want_N, rtol=1e-5, atol=1e-5)
    weights_N = torch.randn_like(want_N)
    grads = [
        torch.autograd.grad((out * weights_N).sum(), made, retain_graph=True)
        for out in (found_U[tree.place_N], want_N)
    ]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_nested_rows_stay_together_and_count_once() -> None:
    rows = nested_rows(np.random.default_rng(6))
    bins = pack_nested(rows, 27)
    assert [row for chosen in bins for row in chosen] == list(range(len(rows)))
    # A text of 9 tokens and its six blocks of 18: one bin for each text, not the 52 tokens of rows.
    assert [len(chosen) for chosen in bins] == [6, 6]
    assert len(pack_nested(rows, 27, multiple_of=4)) == 4
    assert len(pack_nested(rows, 1)) == len(rows)
