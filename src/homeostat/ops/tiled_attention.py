"""Causal attention in fixed tiles: a query's result has the same bits in training, prefill, decode.

    queries and keys of each document -> TilePlan (once per forward) -> tiled_attention (per layer)

A document's queries are cut at multiples of `QUERY_TILE` of their position and its keys at
multiples of `KEY_TILE`; a query goes through its key tiles in order, with the running maximum and
sum of the online softmax (Milakov, Gimelshein 2018, arXiv:1805.02867). `BLOCK` query tiles are
computed at a time, in products of one constant shape.

Invariant: a query stands in the same row of a tile of the same shape, and meets the same keys in
the same order, whether its neighbours are computed with it, were computed before, or do not exist.
A key it cannot see adds exactly 0, and a tile of such keys changes nothing: so blocks may mix
documents of any length.

Keys and values are rows of a store, and a plan says which row holds which position of which head:
packed tokens, cache slots and pages are the same to it.

Suffixes: `_N` queries, `_B` documents, `_T` positions of a document, `_R` rows of the key store,
`_S` the query tiles of a block, `_Q` queries of a tile, `_K` keys of a tile, `_H` heads (of keys,
but in q and out), `_g` query heads per key head, `_d` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.attention import PackedLayout, packed_attention

QUERY_TILE = 8
KEY_TILE = 64
BLOCK = 16


@dataclass(frozen=True, slots=True)
class _Block:
    """Query tiles that are computed together, those with the fewest key tiles first."""

    document_S: Tensor
    length_S: Tensor
    position_SQ: Tensor
    query_SQ: Tensor
    num_key_tiles: int
    first_position: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Which queries attend to which keys, for all layers of a forward."""

    row_BT: Tensor
    head_rows_H: Tensor
    blocks: tuple[_Block, ...]
    num_queries: int

    @classmethod
    def of(
        cls,
        counts_B: Tensor,
        lengths_B: Tensor,
        row_BT: Tensor,
        *,
        num_kv_heads: int,
        head_stride: int,
    ) -> TilePlan:
        """The last `counts_B` of `lengths_B` tokens of each document are queries, laid end to end.

        The key of head h at position t of document b is row `row_BT[b, t] + h * head_stride` of
        the store; beyond the document's length any valid row will do. All int64, counts above 0.
        """
        assert bool((counts_B >= 1).all() and (counts_B <= lengths_B).all()), (counts_B, lengths_B)
        assert row_BT.shape[0] == len(lengths_B), (row_BT.shape, lengths_B.shape)
        assert row_BT.shape[1] >= int(lengths_B.max()), (row_BT.shape, lengths_B)
        num_queries = int(counts_B.sum())
        tiles = _query_tiles(counts_B, lengths_B, padding=num_queries)
        parts = zip(*(x.split(BLOCK) for x in tiles), strict=True)
        blocks = tuple(_block(*part, padding=num_queries) for part in parts)
        at_T = torch.arange(-(-row_BT.shape[1] // KEY_TILE) * KEY_TILE)
        row_BT = row_BT[:, at_T.clamp_(max=row_BT.shape[1] - 1)]
        return cls(row_BT, torch.arange(num_kv_heads) * head_stride, blocks, num_queries)

    @classmethod
    def packed(cls, layout: PackedLayout, *, num_kv_heads: int) -> TilePlan:
        """Whole documents whose tokens are queries and keys at once."""
        lengths_B, offsets_B = torch.tensor(layout.lengths), torch.tensor(layout.offsets)
        token_BT = offsets_B[:, None] + torch.arange(layout.max_length)
        row_BT = token_BT.clamp_(max=layout.num_tokens - 1) * num_kv_heads
        return cls.of(lengths_B, lengths_B, row_BT, num_kv_heads=num_kv_heads, head_stride=1)


def tiled_attention(
    q_NHd: Tensor, k_Rd: Tensor, v_Rd: Tensor, plan: TilePlan, *, scale: float
) -> Tensor:
    """[N, H, d]. Not differentiable."""
    num_queries, num_heads, head_dim = q_NHd.shape
    assert num_queries == plan.num_queries, (q_NHd.shape, plan.num_queries)
    q_Rd = (q_NHd * scale).flatten(0, 1)
    # One token more than there are queries takes what comes out for those that are padding.
    out_Rd = q_NHd.new_empty((num_queries + 1) * num_heads, head_dim)
    for block in plan.blocks:
        _attend_block(q_Rd, k_Rd, v_Rd, out_Rd, plan, block)
    return out_Rd.view(-1, num_heads, head_dim)[:-1]


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """The context of training in invariant numerics: whole documents, nothing before them."""

    layout: PackedLayout
    plan: TilePlan

    @classmethod
    def of(cls, layout: PackedLayout, *, num_kv_heads: int) -> TiledAttention:
        return cls(layout, TilePlan.packed(layout, num_kv_heads=num_kv_heads))

    def attend(
        self, layer: int, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, *, scale: float
    ) -> Tensor:
        return _TiledPacked.apply(q_NHd, k_NHd, v_NHd, self.layout, self.plan, scale)


class _TiledPacked(torch.autograd.Function):
    """The gradient is that of SDPA, computed anew: it agrees to rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        layout: PackedLayout,
        plan: TilePlan,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_NHd, k_NHd, v_NHd)
        ctx.layout, ctx.scale = layout, scale
        k_Rd, v_Rd = k_NHd.flatten(0, 1), v_NHd.flatten(0, 1)
        return tiled_attention(q_NHd, k_Rd, v_Rd, plan, scale=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out_NHd = packed_attention(*leaves, ctx.layout, scale=ctx.scale, kernel="sdpa")
        return *torch.autograd.grad(out_NHd, leaves, grads[0]), None, None, None


def _query_tiles(
    counts_B: Tensor, lengths_B: Tensor, *, padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(document, its length, positions, queries) of each tile, by position.

    A tile has positions before and after its document's queries, too: theirs is query `padding`.
    """
    first_B = lengths_B - counts_B
    num_tiles_B = (lengths_B - 1) // QUERY_TILE - first_B // QUERY_TILE + 1
    document_S = torch.arange(len(counts_B)).repeat_interleave(num_tiles_B)
    nth_S = torch.arange(len(document_S)) - _starts(num_tiles_B)[document_S]
    start_S = (first_B[document_S] // QUERY_TILE + nth_S) * QUERY_TILE
    order_S = start_S.argsort(stable=True)
    document_S = document_S[order_S]
    first_S, length_S = first_B[document_S, None], lengths_B[document_S, None]
    position_SQ = start_S[order_S, None] + torch.arange(QUERY_TILE)
    query_SQ = position_SQ - first_S + _starts(counts_B)[document_S, None]
    is_query_SQ = (position_SQ >= first_S) & (position_SQ < length_S)
    return document_S, length_S, position_SQ, query_SQ.where(is_query_SQ, padding)


def _starts(counts_B: Tensor) -> Tensor:
    return counts_B.cumsum(0) - counts_B


def _block(
    document_S: Tensor, length_S: Tensor, position_SQ: Tensor, query_SQ: Tensor, *, padding: int
) -> _Block:
    """A block of full size: copies of its first tile, whose results go nowhere, fill it up."""
    at_S = torch.arange(BLOCK)
    at_S = at_S.where(at_S < len(document_S), 0)
    query_SQ = query_SQ[at_S]
    query_SQ[len(document_S) :] = padding
    return _Block(
        document_S[at_S],
        length_S[at_S],
        position_SQ[at_S],
        query_SQ,
        # Positions ascend: the last tile has the most keys.
        num_key_tiles=int(position_SQ[-1, 0]) // KEY_TILE + 1,
        first_position=int(position_SQ[0, 0]),
    )


def _attend_block(
    q_Rd: Tensor, k_Rd: Tensor, v_Rd: Tensor, out_Rd: Tensor, plan: TilePlan, block: _Block
) -> None:
    """The online softmax over one block's key tiles. Batch of the products: key heads x tiles."""
    num_kv_heads = len(plan.head_rows_H)
    num_heads = len(out_Rd) // (plan.num_queries + 1)
    head_Hg = torch.arange(num_heads).view(num_kv_heads, 1, -1, 1)
    at_R = (block.query_SQ[:, None] * num_heads + head_Hg).flatten()
    rows = QUERY_TILE * num_heads // num_kv_heads
    q = _take(q_Rd, at_R.clamp(max=len(q_Rd) - 1), rows)
    running = None
    for first_key in range(0, block.num_key_tiles * KEY_TILE, KEY_TILE):
        row_SK = plan.row_BT[block.document_S, first_key : first_key + KEY_TILE]
        at_HSK = row_SK + plan.head_rows_H[:, None, None]
        k, v = (_take(x_Rd, at_HSK.flatten(), KEY_TILE) for x_Rd in (k_Rd, v_Rd))
        scores = torch.bmm(q, k.transpose(1, 2))
        if first_key + KEY_TILE > block.first_position + 1:
            _hide(scores, v, block, first_key)
        running = _online_softmax(running, scores, v)
    _, total, weighted = running
    out_Rd.index_copy_(0, at_R, weighted.div_(total).flatten(0, 1))


def _take(x_Rd: Tensor, at_R: Tensor, rows: int) -> Tensor:
    """A batch of `rows` rows each, contiguous: the layout is constant as well as the shape."""
    return x_Rd.index_select(0, at_R).view(-1, rows, x_Rd.shape[1])


def _online_softmax(
    running: tuple[Tensor, Tensor, Tensor] | None, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum of exponentials, their weighted sum of values) with one more key tile."""
    top = scores.amax(-1, keepdim=True)
    if running is None:
        p = scores.sub_(top).exp_()
        return top, p.sum(-1, keepdim=True), torch.bmm(p, v)
    old_top, total, weighted = running
    top = torch.maximum(old_top, top)
    p = scores.sub_(top).exp_()
    shrink = (old_top - top).exp_()
    total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
    return top, total, weighted.mul_(shrink).add_(torch.bmm(p, v))


def _hide(scores: Tensor, v: Tensor, block: _Block, first_key: int) -> None:
    """Keys after a query score -inf. The values of those beyond the document become 0: they may be
    anything, NaN as well, and 0 * NaN is not 0."""
    key_K = torch.arange(first_key, first_key + KEY_TILE)
    hidden_SQK = block.position_SQ[:, :, None] < key_K
    by_tile = scores.unflatten(1, (-1, QUERY_TILE)).unflatten(0, (-1, BLOCK))
    by_tile.masked_fill_(hidden_SQK[:, None], float("-inf"))
    beyond_SK = block.length_S <= key_K
    v.unflatten(0, (-1, BLOCK)).masked_fill_(beyond_SK[:, :, None], 0.0)
