"""Rows that continue the same texts at different places, computed as a tree.

A row is a prefix of a text and a block that continues it; the blocks of a text begin at many
places, and several may begin at the same one. Every token is computed once: the longest prefix is
the trunk, and all blocks branch off it.

    tokens_N -> [trunk 0][trunk 1]...[blocks of trunk 0][blocks of trunk 1]... = tokens_U

A token of a trunk attends to the trunk before it. Token g of a block that begins behind a prefix of
`a` tokens attends to trunk tokens t < a and to tokens g' <= g of its block; its position is a + g.
So each token sees what it sees in its row alone, and results are those of the rows, up to rounding.

The attention of blocks has no kernel: scores against the trunk are one matrix product for many
blocks, and a softmax in fp32 joins them with the scores inside the block. It is computed for some
blocks at a time and again in the backward pass, so that memory is bounded; checkpointing of whole
layers may surround it.

Suffixes: `_N` packed tokens, `_U` distinct ones, `_B` rows, `_C` blocks, `_G` tokens of a block,
`_T` tokens of a trunk, `_K` key and value heads, `_d` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from homeostat.ops.attention import (
    NO_LIMITS,
    AttentionContext,
    Limits,
    PackedLayout,
    packed_attention,
)
from homeostat.ops.capped_attention import soft_capped
from homeostat.ops.transfer import to_device

# Rows are computed as a tree if that takes less than this share of what sharing equal prompts does.
MAX_SHARE = 0.8
# Largest size of the scores that exist at a time.
SCORE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one trunk that have the same length, in the order of their anchors.

    `start` is their place among the distinct tokens, `trunk` that of their trunk. `anchors` are the
    lengths of the prefixes that they continue.
    """

    trunk: int
    start: int
    length: int
    anchors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Branches:
    """The distinct tokens of a batch as a tree.

    `unique_U` are the positions of the distinct tokens, `place_N` says which of them each token is.
    """

    unique_U: Tensor
    place_N: Tensor
    trunks: PackedLayout
    blocks: tuple[Blocks, ...]

    @classmethod
    def find(
        cls,
        tokens_N: np.ndarray,
        lengths_B: np.ndarray,
        prefix_lengths_B: np.ndarray,
        *,
        device: torch.device,
        alike: Sequence[np.ndarray] = (),
    ) -> Branches | None:
        """Find the tree of a batch; None if its rows hardly continue each other's prefixes.

        `alike` holds values of all tokens ([N, ...]) that decide what is computed, as replayed
        routes do: they must be equal, too.
        """
        starts_B = np.cumsum(lengths_B) - lengths_B
        prefixes = [
            tuple(values_N[start : start + size].tobytes() for values_N in (tokens_N, *alike))
            for start, size in zip(starts_B, prefix_lengths_B, strict=True)
        ]
        # Of rows with the same prefix the first stands for all.
        first_with: dict[tuple[bytes, ...], int] = {}
        first_B = [first_with.setdefault(prefix, row) for row, prefix in enumerate(prefixes)]
        trunk_of = _trunks({row: prefix for prefix, row in first_with.items()})
        trunk_of_B = np.array([trunk_of[row] for row in first_B])
        num_blocks = int((lengths_B - prefix_lengths_B).sum())
        size = int(prefix_lengths_B[np.unique(trunk_of_B)].sum()) + num_blocks
        if size >= MAX_SHARE * (int(prefix_lengths_B[np.unique(first_B)].sum()) + num_blocks):
            return None
        return cls._laid_out(starts_B, lengths_B, prefix_lengths_B, trunk_of_B, device=device)

    def attention(
        self,
        layout: PackedLayout,
        *,
        kernel: str,
        packed: Callable[[PackedLayout], AttentionContext],
    ) -> BranchAttention:
        """Return the attention over distinct tokens."""
        return BranchAttention(self, kernel)

    @classmethod
    def _laid_out(
        cls,
        starts_B: np.ndarray,
        lengths_B: np.ndarray,
        prefix_lengths_B: np.ndarray,
        trunk_of_B: np.ndarray,
        *,
        device: torch.device,
    ) -> Branches:
        trunks = np.unique(trunk_of_B)
        sizes = prefix_lengths_B[trunks]
        trunk_starts = dict(zip(trunks.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True))
        unique = [starts_B[t] + np.arange(n) for t, n in zip(trunks, sizes, strict=True)]
        place_N = np.zeros(int(lengths_B.sum()), dtype=np.int64)
        block_lengths_B = lengths_B - prefix_lengths_B
        order = np.lexsort((prefix_lengths_B, block_lengths_B, trunk_of_B))
        blocks: list[Blocks] = []
        at = int(sizes.sum())
        for row in order.tolist():
            trunk, prefix = trunk_starts[int(trunk_of_B[row])], int(prefix_lengths_B[row])
            start, length = int(starts_B[row]), int(block_lengths_B[row])
            place_N[start : start + prefix] = trunk + np.arange(prefix)
            place_N[start + prefix : start + prefix + length] = at + np.arange(length)
            unique.append(start + prefix + np.arange(length))
            if blocks and (blocks[-1].trunk, blocks[-1].length) == (trunk, length):
                last = blocks.pop()
                blocks.append(Blocks(trunk, last.start, length, (*last.anchors, prefix)))
            elif length:
                blocks.append(Blocks(trunk, at, length, (prefix,)))
            at += length
        return cls(
            to_device(torch.from_numpy(np.concatenate(unique)), device),
            to_device(torch.from_numpy(place_N), device),
            PackedLayout.of(sizes.tolist(), device),
            tuple(blocks),
        )


def _trunks(prefixes: Mapping[int, tuple[bytes, ...]]) -> dict[int, int]:
    """Return, for each row, the row whose prefix is its trunk: the longest that begins alike.

    A prefix is the raw bytes of its tokens, and of the other values that decide.
    """
    trunk_of: dict[int, int] = {}
    trunks: list[int] = []
    for row in sorted(prefixes, key=lambda row: -len(prefixes[row][0])):
        for trunk in trunks:
            pairs = zip(prefixes[trunk], prefixes[row], strict=True)
            if all(long.startswith(short) for long, short in pairs):
                trunk_of[row] = trunk
                break
        else:
            trunks.append(row)
            trunk_of[row] = row
    return trunk_of


@dataclass(frozen=True, slots=True)
class BranchAttention:
    """The attention context of a tree of rows; `kernel` computes the trunks."""

    branches: Branches
    kernel: str

    def attend(
        self,
        layer: int,
        q_UHd: Tensor,
        k_UHd: Tensor,
        v_UHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        trunks = self.branches.trunks
        sizes = [trunks.num_tokens, q_UHd.shape[0] - trunks.num_tokens]
        (q_THd, _), (k_THd, _), (v_THd, _) = (x.split(sizes) for x in (q_UHd, k_UHd, v_UHd))
        how = {"scale": scale, "limits": limits}
        parts = [packed_attention(q_THd, k_THd, v_THd, trunks, kernel=self.kernel, **how)]
        for blocks in self.branches.blocks:
            parts += _attend_blocks(q_UHd, k_UHd, v_UHd, blocks, **how)
        return torch.cat(parts)


def _attend_blocks(
    q_UHd: Tensor, k_UHd: Tensor, v_UHd: Tensor, blocks: Blocks, *, scale: float, limits: Limits
) -> Iterator[Tensor]:
    """Yield the results of some blocks after others, in order."""
    length, anchors = blocks.length, blocks.anchors
    row_bytes = 4 * q_UHd.shape[1] * length * (anchors[-1] + length)
    some = max(1, SCORE_BYTES // row_bytes)
    for first in range(0, len(anchors), some):
        chosen = anchors[first : first + some]
        start, reach = blocks.start + first * length, max(chosen)
        own = slice(start, start + len(chosen) * length)
        trunk = slice(blocks.trunk, blocks.trunk + reach)
        anchor_C = to_device(torch.tensor(chosen), q_UHd.device)
        qkv = (q_UHd[own], k_UHd[own], v_UHd[own], k_UHd[trunk], v_UHd[trunk])
        how = (anchor_C, length, scale, limits)
        if torch.is_grad_enabled():
            yield checkpoint(
                block_attention, *qkv, *how, use_reentrant=False, preserve_rng_state=False
            )
        else:
            yield block_attention(*qkv, *how)


def block_attention(
    q_NHd: Tensor,
    k_NKd: Tensor,
    v_NKd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    anchor_C: Tensor,
    length: int,
    scale: float,
    limits: Limits = NO_LIMITS,
) -> Tensor:
    """Return [N, H, d] of C blocks, which see their prefixes of the trunk and themselves."""
    num_blocks, (_, num_heads, dim) = len(anchor_C), q_NHd.shape
    num_keys = k_NKd.shape[1]
    grouped = num_heads // num_keys
    # Queries as [K, C, grouped * G, d]: those that share a key head are rows of one product.
    q = q_NHd.reshape(num_blocks, length, num_keys, grouped, dim).permute(2, 0, 3, 1, 4)
    q_KCd = (q * scale).reshape(num_keys, num_blocks, grouped * length, dim)
    own_k, own_v = (
        x.reshape(num_blocks, length, num_keys, dim).permute(2, 0, 1, 3) for x in (k_NKd, v_NKd)
    )
    trunk_k, trunk_v = (x.transpose(0, 1) for x in (k_TKd, v_TKd))
    to_trunk = (q_KCd.flatten(1, 2) @ trunk_k.transpose(1, 2)).unflatten(1, q_KCd.shape[1:3])
    at_T = torch.arange(k_TKd.shape[0], device=q_NHd.device)
    hidden_CT = at_T[None] >= anchor_C[:, None]
    hidden_GG = torch.ones(length, length, dtype=torch.bool, device=q_NHd.device).triu(1)
    hidden_CGT = hidden_CT[:, None]
    to_trunk, to_own = to_trunk.float(), (q_KCd @ own_k.transpose(2, 3)).float()
    if limits.soft_cap is not None:
        to_trunk, to_own = (soft_capped(scores, limits.soft_cap) for scores in (to_trunk, to_own))
    if limits.window is not None:
        position_CG = anchor_C[:, None] + torch.arange(length, device=q_NHd.device)
        is_old_CGT = at_T <= position_CG[..., None] - limits.window
        hidden_CGT = (hidden_CGT | is_old_CGT).repeat(1, grouped, 1)
        hidden_GG = hidden_GG | torch.ones_like(hidden_GG).tril(-limits.window)
    to_trunk = to_trunk.masked_fill(hidden_CGT[None], -torch.inf)
    to_own = to_own.masked_fill(hidden_GG.repeat(grouped, 1), -torch.inf)
    weights = torch.cat([to_trunk, to_own], dim=-1).softmax(-1).to(v_NKd.dtype)
    w_trunk, w_own = weights.split([k_TKd.shape[0], length], dim=-1)
    from_trunk = (w_trunk.flatten(1, 2) @ trunk_v).unflatten(1, q_KCd.shape[1:3])
    out = (from_trunk + w_own @ own_v).reshape(num_keys, num_blocks, grouped, length, dim)
    return out.permute(1, 3, 0, 2, 4).reshape(num_blocks * length, num_heads, dim)
