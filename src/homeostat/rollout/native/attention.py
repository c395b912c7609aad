"""The attention contexts of the engine: what each token of a forward pass attends to.

Prefill: packed chunks; a chunk that begins a sequence sees itself alone, as in training; one that
continues a sequence sees the sequence's cache too. Decode: one token per sequence, over its cache.

In invariant numerics one context serves both, and gives each token the bits it has in training.

Each writes the new keys and values to the cache, layer by layer, before anything reads them.

Suffixes: `_N` packed tokens, `_B` sequences, `_H` heads, `_K` blocks of a sequence, `_d` head dim.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from homeostat.ops.attention import NO_LIMITS, Limits, PackedLayout, packed_attention
from homeostat.ops.capped_attention import capped_attention
from homeostat.ops.tiled_attention import TilePlan, tiled_attention
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.scheduler import Chunk
from homeostat.rollout.native.sequence import Sequence


class PrefillAttention:
    """Chunks in packed order, those that begin a sequence first."""

    def __init__(self, cache: KVCache, chunks: list[Chunk], *, kernel: str) -> None:
        self.cache = cache
        self.kernel = kernel
        lengths = [chunk.end - chunk.start for chunk in chunks]
        first = [length for chunk, length in zip(chunks, lengths, strict=True) if chunk.start == 0]
        self.num_first = sum(first)
        self.layout = PackedLayout.of(first, cache.device) if first else None
        self.later = [
            (slice(end - length, end), _Continued(cache, chunk))
            for chunk, length, end in zip(chunks, lengths, accumulate(lengths), strict=True)
            if chunk.start > 0
        ]
        places = [_places(chunk, cache.block_tokens) for chunk in chunks]
        blocks_N, offsets_N = np.concatenate(places, axis=1)
        self.slots = cache.slots(
            to_device(blocks_N, cache.device), to_device(offsets_N, cache.device)
        )

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
        self.cache.write(layer, self.slots, k_NHd, v_NHd)
        outputs = []
        if self.layout is not None:
            q, k, v = (x[: self.num_first] for x in (q_NHd, k_NHd, v_NHd))
            how = {"scale": scale, "kernel": self.kernel, "limits": limits}
            outputs.append(packed_attention(q, k, v, self.layout, **how))
        outputs += [chunk.attend(layer, q_NHd[span], scale, limits) for span, chunk in self.later]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class _Continued:
    """A chunk whose sequence has tokens before it in the cache."""

    def __init__(self, cache: KVCache, chunk: Chunk) -> None:
        self.cache = cache
        num_blocks = -(-chunk.end // cache.block_tokens)
        blocks_K = np.array(chunk.sequence.blocks[:num_blocks], dtype=np.int64)
        self.tables_1HK = cache.tables(to_device(blocks_K[None], cache.device))
        positions = torch.arange(num_blocks * cache.block_tokens, device=cache.device)
        # How far each key is behind each query; below 0: it comes later.
        self.distance_NT = positions[chunk.start : chunk.end, None] - positions

    def attend(self, layer: int, q_NHd: Tensor, scale: float, limits: Limits) -> Tensor:
        keys, values = self.cache.gather(layer, self.tables_1HK)
        sees_NT = self.distance_NT >= 0
        if limits.window is not None:
            sees_NT &= self.distance_NT < limits.window
        qkv = (q_NHd.transpose(0, 1)[None], keys, values)
        if limits.soft_cap is not None:
            out = capped_attention(*qkv, sees=sees_NT, scale=scale, soft_cap=limits.soft_cap)
            return out[0].transpose(0, 1)
        is_grouped = q_NHd.shape[1] != keys.shape[1]
        out = functional.scaled_dot_product_attention(
            *qkv, attn_mask=sees_NT, scale=scale, enable_gqa=is_grouped
        )
        return out[0].transpose(0, 1)


class DecodeAttention:
    """The last token of each sequence. If `in_rows`, sequence b has block b alone."""

    def __init__(
        self,
        cache: KVCache,
        sequences: list[Sequence],
        positions_B: Tensor,
        *,
        dtype: torch.dtype,
        in_rows: bool,
    ) -> None:
        self.cache = cache
        self.num_rows = len(sequences)
        self.length = max(sequence.cached for sequence in sequences) + 1
        self.tables_BHK = None
        if in_rows:
            blocks_B = torch.arange(self.num_rows, device=cache.device)
        else:
            num_blocks = -(-self.length // cache.block_tokens)
            blocks_BK = to_device(_padded_blocks(sequences, num_blocks), cache.device)
            blocks_B = blocks_BK.gather(1, (positions_B // cache.block_tokens)[:, None])[:, 0]
            self.tables_BHK = cache.tables(blocks_BK)
            self.length = num_blocks * cache.block_tokens
        self.slots = cache.slots(blocks_B, positions_B % cache.block_tokens)
        self.dtype = dtype
        # How far each key is behind the query; below 0: there is none yet.
        self.distance_BL = positions_B[:, None] - torch.arange(self.length, device=cache.device)
        self.masks: dict[int | None, Tensor] = {None: self._mask(None)}

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
        # Each sequence has one token here: N is B.
        self.cache.write(layer, self.slots, k_NHd, v_NHd)
        # The query heads that share a key head go as its queries: no head is repeated.
        q_BHGd = q_NHd.unflatten(1, (k_NHd.shape[1], -1))
        if self.tables_BHK is None:
            keys, values = self.cache.rows(layer, self.num_rows, self.length)
        else:
            keys, values = self.cache.gather(layer, self.tables_BHK)
        if limits.soft_cap is not None:
            sees = self._sees(limits.window)[:, None, None]
            how = {"scale": scale, "soft_cap": limits.soft_cap}
            return capped_attention(q_NHd[:, :, None], keys, values, sees=sees, **how)[:, :, 0]
        window = limits.window_in(self.length)
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        out_BHGd = functional.scaled_dot_product_attention(
            q_BHGd, keys, values, attn_mask=self.masks[window], scale=scale
        )
        return out_BHGd.flatten(1, 2)

    def _sees(self, window: int | None) -> Tensor:
        sees_BL = self.distance_BL >= 0
        return sees_BL if window is None else sees_BL & (self.distance_BL < window)

    def _mask(self, window: int | None) -> Tensor:
        """Return [B, 1, 1, L] that is added to the scores: 0 or -inf."""
        hidden_BL = ~self._sees(window)
        mask_BL = torch.zeros(hidden_BL.shape, dtype=self.dtype, device=hidden_BL.device)
        return mask_BL.masked_fill_(hidden_BL, -torch.inf)[:, None, None]


class InvariantAttention:
    """Chunks in packed order.

    Each attends to all cached tokens of its sequence, its own included.
    """

    def __init__(self, cache: KVCache, chunks: list[Chunk]) -> None:
        self.cache = cache
        places = [_places(chunk, cache.block_tokens) for chunk in chunks]
        blocks_N, offsets_N = np.concatenate(places, axis=1)
        self.slots = cache.slots(
            to_device(blocks_N, cache.device), to_device(offsets_N, cache.device)
        )
        counts_B = np.array([chunk.end - chunk.start for chunk in chunks])
        lengths_B = np.array([chunk.end for chunk in chunks])
        at_T, offsets_T = np.divmod(np.arange(lengths_B.max()), cache.block_tokens)
        blocks_BK = _padded_blocks([chunk.sequence for chunk in chunks], at_T[-1] + 1)
        stride = cache.num_heads * cache.block_tokens
        self.plan = TilePlan.of(
            torch.from_numpy(counts_B),
            torch.from_numpy(lengths_B),
            to_device(blocks_BK[:, at_T] * stride + offsets_T, cache.device),
            num_kv_heads=cache.num_heads,
            head_stride=cache.block_tokens,
        )

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
        self.cache.write(layer, self.slots, k_NHd, v_NHd)
        how = {"scale": scale, "limits": limits}
        return tiled_attention(q_NHd, *self.cache.store(layer), self.plan, **how)


def _places(chunk: Chunk, block_tokens: int) -> np.ndarray:
    """Return [2, N]: the block and the offset in it of each token of a chunk."""
    at_N, offsets_N = np.divmod(np.arange(chunk.start, chunk.end), block_tokens)
    return np.stack([np.array(chunk.sequence.blocks, dtype=np.int64)[at_N], offsets_N])


def _padded_blocks(sequences: list[Sequence], num_blocks: int) -> np.ndarray:
    """Return [B, K]; block 0 stands in where a sequence has fewer, and the mask hides it."""
    blocks_BK = np.zeros((len(sequences), num_blocks), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        kept = sequence.blocks[:num_blocks]
        blocks_BK[row, : len(kept)] = kept
    return blocks_BK
