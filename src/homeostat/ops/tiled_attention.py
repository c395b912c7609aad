"""Causal attention in fixed tiles: a query has the same bits in training, prefill and decoding.

    queries and keys of each document -> TilePlan (once per forward) -> tiled_attention (per layer)

The queries of a document are split at multiples of `QUERY_TILE` of their position and its keys at
multiples of `KEY_TILE`; a query goes through its key tiles in order, with the running maximum and
sum of the online softmax (Milakov, Gimelshein 2018, arXiv:1805.02867). `BLOCK` query tiles are
computed at a time, in products of one constant shape.

Invariant: a query is in the same row of a tile of the same shape, and meets the same keys in the
same order, whether its neighbours are computed with it, were computed before, or do not exist. A
key that it cannot see adds exactly 0, and a tile of such keys changes nothing, so blocks may mix
documents of any length. The same holds of keys before a window: with one, the running sums start
from 0, so that a query whose first tiles are hidden has the bits that it has without these tiles.

Keys and values are rows of a store, and a plan says which row holds which position of which head,
so packed tokens, cache slots and pages are all handled alike.

On CUDA a kernel (ops/kernels/attention.py) has one program per query tile and key head, and needs
no blocks. Plans are made on the host, once for all layers; the parts that a kernel reads are copied
to the device.

Suffixes: `_N` queries, `_B` documents, `_T` positions of documents, `_R` rows of the key store,
`_S` query tiles, `_Q` queries of a tile, `_K` keys of a tile, `_H` heads (of keys, except in q and
out), `_g` query heads per key head, `_d` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops import kernels
from homeostat.ops.activations import invariant_tanh
from homeostat.ops.attention import NO_LIMITS, Limits, PackedLayout, packed_attention
from homeostat.ops.transfer import to_device

QUERY_TILE = 8
KEY_TILE = 64
BLOCK = 16
# The maximum of keys that are all hidden: below any score, and no -inf, which would give NaN.
_NO_SCORE = -1e30


@dataclass(frozen=True, slots=True)
class _Block:
    """Query tiles that are computed together, those with the fewest key tiles first."""

    document_S: Tensor
    length_S: Tensor
    position_SQ: Tensor
    query_SQ: Tensor
    num_key_tiles: int
    first_position: int


@dataclass(frozen=True)
class TilePlan:
    """The assignment of queries to keys, for all layers of a forward pass.

    The last `counts_B` of `lengths_B` tokens of each document are queries, concatenated. The key of
    head h at position t of document b is row `row_T[starts_B[b] + t] + h * head_stride` of the
    store. All arrays are int64 and on the host, except `row_T`, which is on the device of the
    store.
    """

    counts_B: Tensor
    lengths_B: Tensor
    row_T: Tensor
    starts_B: Tensor
    num_kv_heads: int
    head_stride: int

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
        """Make a plan from as many rows for each document as the longest one needs.

        Beyond a document's length any valid row will do. Counts are above 0.
        """
        assert bool((counts_B >= 1).all() and (counts_B <= lengths_B).all()), (counts_B, lengths_B)
        assert row_BT.shape[0] == len(lengths_B), (row_BT.shape, lengths_B.shape)
        assert row_BT.shape[1] >= int(lengths_B.max()), (row_BT.shape, lengths_B)
        starts_B = torch.arange(row_BT.shape[0]) * row_BT.shape[1]
        return cls(counts_B, lengths_B, row_BT.flatten(), starts_B, num_kv_heads, head_stride)

    @classmethod
    def packed(cls, layout: PackedLayout, *, num_kv_heads: int) -> TilePlan:
        """Make a plan for whole documents whose tokens are both queries and keys."""
        lengths_B, offsets_B = torch.tensor(layout.lengths), torch.tensor(layout.offsets)
        row_T = torch.arange(layout.num_tokens, device=layout.cu_seqlens.device) * num_kv_heads
        return cls(lengths_B, lengths_B, row_T, offsets_B, num_kv_heads, head_stride=1)

    @cached_property
    def num_queries(self) -> int:
        return int(self.counts_B.sum())

    @cached_property
    def document_and_start_SS(self) -> tuple[Tensor, Tensor]:
        """Return the document of each query tile, and where in it the tile begins."""
        first_B = self.lengths_B - self.counts_B
        num_tiles_B = (self.lengths_B - 1) // QUERY_TILE - first_B // QUERY_TILE + 1
        document_S = torch.arange(len(first_B)).repeat_interleave(num_tiles_B)
        nth_S = torch.arange(len(document_S)) - _starts(num_tiles_B)[document_S]
        start_S = (first_B[document_S] // QUERY_TILE + nth_S) * QUERY_TILE
        # Tiles of a block go through as many key tiles as its longest one, so group similar
        # positions.
        order_S = start_S.argsort(stable=True)
        return document_S[order_S], start_S[order_S]

    @cached_property
    def tiles_5S(self) -> Tensor:
        """Return five numbers per query tile for the kernel.

        They are where the tile begins, its document's first query and length, which query would be
        at its beginning, and where its document's rows begin.
        """
        document_S, start_S = self.document_and_start_SS
        first_B = self.lengths_B - self.counts_B
        nth_S = start_S + (_starts(self.counts_B) - first_B)[document_S]
        columns = [x_B[document_S] for x_B in (first_B, self.lengths_B, self.starts_B)]
        tiles_5S = torch.stack([start_S, *columns[:2], nth_S, columns[2]])
        return to_device(tiles_5S, self.row_T.device)

    @cached_property
    def row_BT(self) -> Tensor:
        """Return the rows of each document, padded to a whole number of key tiles."""
        at_T = torch.arange(-(-int(self.lengths_B.max()) // KEY_TILE) * KEY_TILE)
        return self.row_T[(self.starts_B[:, None] + at_T).clamp_(max=len(self.row_T) - 1)]

    @cached_property
    def head_rows_H(self) -> Tensor:
        return torch.arange(self.num_kv_heads) * self.head_stride

    @cached_property
    def blocks(self) -> tuple[_Block, ...]:
        tiles = _query_tiles(self)
        parts = zip(*(x.split(BLOCK) for x in tiles), strict=True)
        return tuple(_block(*part, padding=self.num_queries) for part in parts)


def tiled_attention(
    q_NHd: Tensor,
    k_Rd: Tensor,
    v_Rd: Tensor,
    plan: TilePlan,
    *,
    scale: float,
    limits: Limits = NO_LIMITS,
) -> Tensor:
    """Return [N, H, d]. Not differentiable."""
    num_queries, num_heads, head_dim = q_NHd.shape
    assert num_queries == plan.num_queries, (q_NHd.shape, plan.num_queries)
    if kernels.fused(q_NHd):
        return _kernel_attention(q_NHd, k_Rd, v_Rd, plan, scale=scale, limits=limits)
    # Scale the queries once instead of the scores of every key tile.
    q_Rd = (q_NHd * scale).flatten(0, 1)
    # One extra token receives the results of padding queries.
    out_Rd = q_NHd.new_empty((num_queries + 1) * num_heads, head_dim)
    for block in plan.blocks:
        _attend_block(q_Rd, k_Rd, v_Rd, out_Rd, plan, block, limits)
    return out_Rd.view(-1, num_heads, head_dim)[:-1]


def _kernel_attention(
    q_NHd: Tensor, k_Rd: Tensor, v_Rd: Tensor, plan: TilePlan, *, scale: float, limits: Limits
) -> Tensor:
    from homeostat.ops.kernels.attention import attend

    return attend(
        q_NHd,
        k_Rd,
        v_Rd,
        tiles_5S=plan.tiles_5S,
        row_T=plan.row_T,
        num_kv_heads=plan.num_kv_heads,
        head_stride=plan.head_stride,
        queries=QUERY_TILE,
        keys=KEY_TILE,
        scale=scale,
        limits=limits,
    )


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """The context of training in invariant numerics: whole documents without a cache.

    `kernel` names the kernel of ops/attention.py whose gradient is used.
    """

    layout: PackedLayout
    plan: TilePlan
    kernel: str = "sdpa"

    @classmethod
    def of(cls, layout: PackedLayout, *, num_kv_heads: int, kernel: str = "sdpa") -> TiledAttention:
        return cls(layout, TilePlan.packed(layout, num_kv_heads=num_kv_heads), kernel)

    def attend(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        return _TiledPacked.apply(q_NHd, k_NHd, v_NHd, self, scale, limits)


class _TiledPacked(torch.autograd.Function):
    """Use the gradient of a plain kernel, computed again; it agrees up to rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        context: TiledAttention,
        scale: float,
        limits: Limits,
    ) -> Tensor:
        ctx.save_for_backward(q_NHd, k_NHd, v_NHd)
        ctx.context, ctx.how = context, {"scale": scale, "limits": limits}
        k_Rd, v_Rd = k_NHd.flatten(0, 1), v_NHd.flatten(0, 1)
        return tiled_attention(q_NHd, k_Rd, v_Rd, context.plan, **ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # Gradients need not be bitwise invariant, so a fast kernel recomputes the forward pass.
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        layout, kernel = ctx.context.layout, ctx.context.kernel
        with torch.enable_grad():
            out_NHd = packed_attention(*leaves, layout, kernel=kernel, **ctx.how)
        return *torch.autograd.grad(out_NHd, leaves, grads[0]), None, None, None


def _query_tiles(plan: TilePlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (document, its length, positions, queries) of each tile, by position.

    A tile also has positions before and after its document's queries; these have query N.
    """
    document_S, start_S = plan.document_and_start_SS
    length_S1 = plan.lengths_B[document_S, None]
    first_S1 = length_S1 - plan.counts_B[document_S, None]
    position_SQ = start_S[:, None] + torch.arange(QUERY_TILE)
    query_SQ = position_SQ - first_S1 + _starts(plan.counts_B)[document_S, None]
    is_query_SQ = (position_SQ >= first_S1) & (position_SQ < length_S1)
    return document_S, length_S1, position_SQ, query_SQ.where(is_query_SQ, plan.num_queries)


def _starts(counts_B: Tensor) -> Tensor:
    return counts_B.cumsum(0) - counts_B


def _block(
    document_S: Tensor, length_S: Tensor, position_SQ: Tensor, query_SQ: Tensor, *, padding: int
) -> _Block:
    """Make a block of full size, filled up with copies of its first tile; their results are
    unused.
    """
    at_S = torch.arange(BLOCK)
    at_S = at_S.where(at_S < len(document_S), 0)
    query_SQ = query_SQ[at_S]
    query_SQ[len(document_S) :] = padding
    return _Block(
        document_S[at_S],
        length_S[at_S],
        position_SQ[at_S],
        query_SQ,
        # Positions ascend, so the last tile has the most keys.
        num_key_tiles=int(position_SQ[-1, 0]) // KEY_TILE + 1,
        first_position=int(position_SQ[0, 0]),
    )


def _attend_block(
    q_Rd: Tensor,
    k_Rd: Tensor,
    v_Rd: Tensor,
    out_Rd: Tensor,
    plan: TilePlan,
    block: _Block,
    limits: Limits,
) -> None:
    """Compute the online softmax over one block's key tiles, batched over key heads x tiles."""
    num_kv_heads = len(plan.head_rows_H)
    num_heads = len(out_Rd) // (plan.num_queries + 1)
    head_Hg = torch.arange(num_heads).view(num_kv_heads, 1, -1, 1)
    at_R = (block.query_SQ[:, None] * num_heads + head_Hg).flatten()
    rows = QUERY_TILE * num_heads // num_kv_heads
    q = _take(q_Rd, at_R.clamp(max=len(q_Rd) - 1), rows)
    window = limits.window
    running = None if window is None else _nothing_yet(q)
    first_seen = 0 if window is None else max(0, block.first_position - window + 1)
    start = first_seen // KEY_TILE * KEY_TILE
    for first_key in range(start, block.num_key_tiles * KEY_TILE, KEY_TILE):
        row_SK = plan.row_BT[block.document_S, first_key : first_key + KEY_TILE]
        at_HSK = row_SK + plan.head_rows_H[:, None, None]
        k, v = (_take(x_Rd, at_HSK.flatten(), KEY_TILE) for x_Rd in (k_Rd, v_Rd))
        scores = torch.bmm(q, k.transpose(1, 2))
        if limits.soft_cap is not None:
            scores = invariant_tanh(scores.div_(limits.soft_cap)).mul_(limits.soft_cap)
        # Earlier key tiles are visible to every query of the block, so there is nothing to hide.
        if window is not None or first_key + KEY_TILE > block.first_position + 1:
            _hide(scores, v, block, first_key, window)
        running = _online_softmax(running, scores, v)
    _, total, weighted = running
    out_Rd.index_copy_(0, at_R, weighted.div_(total).flatten(0, 1))


def _take(x_Rd: Tensor, at_R: Tensor, rows: int) -> Tensor:
    """Gather `rows` rows per batch entry, contiguous, so that layout and shape are constant."""
    return x_Rd.index_select(0, at_R).view(-1, rows, x_Rd.shape[1])


def _nothing_yet(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running values of queries that have seen no key."""
    total = q.new_zeros(*q.shape[:2], 1)
    return torch.full_like(total, _NO_SCORE), total, torch.zeros_like(q)


def _online_softmax(
    running: tuple[Tensor, Tensor, Tensor] | None, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one key tile to (maximum, sum of exponentials, weighted sum of values)."""
    top = scores.amax(-1, keepdim=True)
    if running is None:
        p = scores.sub_(top).exp_()
        return top, p.sum(-1, keepdim=True), torch.bmm(p, v)
    old_top, total, weighted = running
    top = torch.maximum(old_top, top)
    p = scores.sub_(top).exp_()
    # Sums so far are relative to the old maximum; rescale them to the new one.
    shrink = (old_top - top).exp_()
    total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
    return top, total, weighted.mul_(shrink).add_(torch.bmm(p, v))


def _hide(scores: Tensor, v: Tensor, block: _Block, first_key: int, window: int | None) -> None:
    """Set the scores of keys after a query, or before its window, to -inf.

    Values beyond the document become 0.
    Those values may be anything, even NaN, and 0 * NaN is not 0.
    """
    key_K = torch.arange(first_key, first_key + KEY_TILE)
    hidden_SQK = block.position_SQ[:, :, None] < key_K
    if window is not None:
        hidden_SQK |= key_K <= block.position_SQ[:, :, None] - window
    by_tile = scores.unflatten(1, (-1, QUERY_TILE)).unflatten(0, (-1, BLOCK))
    by_tile.masked_fill_(hidden_SQK[:, None], float("-inf"))
    beyond_SK = block.length_S <= key_K
    v.unflatten(0, (-1, BLOCK)).masked_fill_(beyond_SK[:, :, None], 0.0)
