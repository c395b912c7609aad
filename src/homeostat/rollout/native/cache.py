"""Keys and values of the tokens computed so far, in blocks.

    per layer [2, blocks, heads, block_tokens, d]

One storage serves two layouts. With small blocks a sequence has a list of blocks, prompts are
shared block by block, and a batch is gathered before attention. With blocks as long as a sequence,
each sequence is one row, and a batch with the rows 0 .. B-1 is a view: a decoding step gathers and
copies nothing, which on a CPU would double its cost.

In FP8 (`Fp8Cache`) each key and value of a token and head has its own scale. It is known when the
token is written, and does not depend on other tokens.

Invariant: memory is zero before it is written, so masked entries are always finite.

Suffixes: `_N` packed tokens, `_B` sequences, `_H` key heads, `_L` keys, `_d` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.errors import EngineError
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.transformers_attention import CacheShape
from homeostat.precision.fp8 import quantise
from homeostat.precision.recipe import E4M3
from homeostat.rollout.native.scheduler import Copy


def token_bytes(
    config: DecoderConfig | CacheShape, dtype: torch.dtype, *, is_fp8: bool = False
) -> int:
    """Return the bytes that one token takes in the cache of all layers."""
    head = config.head_dim * dtype.itemsize
    if is_fp8:
        head = config.head_dim + SCALE_BYTES
    return 2 * config.num_layers * config.num_kv_heads * head


# The bytes of the scale of a key or value in FP8.
SCALE_BYTES = 4


class KVCache:
    """Storage that grows to the blocks in use, up to `max_blocks`."""

    def __init__(
        self,
        config: DecoderConfig | CacheShape,
        *,
        block_tokens: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads = config.num_kv_heads
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.device = device
        shape = (2, 0, config.num_kv_heads, block_tokens, config.head_dim)
        place = {"dtype": dtype, "device": device}
        self._layers = [torch.zeros(shape, **place) for _ in range(config.num_layers)]
        # All stored tensors, a list by layers each: [2, blocks, heads, block_tokens, ...].
        self._kept = [self._layers]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for parts in self._kept for part in parts)

    def reserve(self, num_blocks: int) -> None:
        """Make room for blocks 0 .. num_blocks - 1. The room doubles, so copies are rare."""
        if num_blocks <= self.num_blocks:
            return
        wanted = min(max(num_blocks, 2 * self.num_blocks), self.max_blocks)
        for parts in self._kept:
            for index, part in enumerate(parts):
                parts[index] = self._grown(part, wanted)
        self.num_blocks = wanted

    def _grown(self, part: Tensor, wanted: int) -> Tensor:
        try:
            grown = part.new_zeros((2, wanted, *part.shape[2:]))
        except RuntimeError as error:
            raise EngineError(
                f"the engine's cache cannot grow to {wanted} blocks of {self.block_tokens} "
                f"tokens: {error}. Lower engine.memory_share or engine.max_concurrency."
            ) from None
        grown[:, : self.num_blocks] = part
        return grown

    def copy(self, copies: list[Copy]) -> None:
        """Make copies in order, or all at once if none reads what another writes.

        Whole blocks are copied. In a target nothing was written beyond the tokens of its copy, so
        the rest of the block does no harm.
        """
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        if set(sources) & set(targets):
            for copy in copies:
                self.copy([copy])
        elif copies:
            length = max(copy.num_tokens for copy in copies)
            for part in (part for parts in self._kept for part in parts):
                part[:, targets, :, :length] = part[:, sources, :, :length]

    def slots(self, blocks_N: Tensor, offsets_N: Tensor) -> Tensor:
        """Return int64 [N * H]: where `write` puts the keys and values of tokens."""
        heads_H = torch.arange(self.num_heads, device=self.device)
        rows_NH = blocks_N[:, None] * self.num_heads + heads_H
        return (rows_NH * self.block_tokens + offsets_N[:, None]).flatten()

    def write(self, layer: int, slots: Tensor, k_NHd: Tensor, v_NHd: Tensor) -> None:
        keys, values = self.store(layer)
        keys.index_copy_(0, slots, k_NHd.flatten(0, 1))
        values.index_copy_(0, slots, v_NHd.flatten(0, 1))

    def addresses(self) -> list[tuple[int, ...]]:
        """Return where keys and values of each layer begin in memory, and in FP8 their scales.

        Growing moves them.
        """
        layers = zip(*self._kept, strict=True)
        return [tuple(side.data_ptr() for part in parts for side in part) for parts in layers]

    def store(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, d] in the numbering of `slots`, as views."""
        keys, values = self._layers[layer].flatten(1, 3)
        return keys, values

    def rows(self, layer: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, L, d] of the first rows, as views."""
        keys, values = self._layers[layer][:, :num_rows, :, :length]
        return keys, values

    def tables(self, blocks_BK: Tensor) -> Tensor:
        """Return int64 [B, H, K]: where `gather` finds the blocks of each sequence and head."""
        heads_H = torch.arange(self.num_heads, device=self.device)
        return blocks_BK[:, None, :] * self.num_heads + heads_H[:, None]

    def gather(self, layer: int, tables_BHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values [B, H, K * block_tokens, d]."""
        shape = (*tables_BHK.shape[:2], -1, self._layers[layer].shape[-1])
        keys, values = (
            part.flatten(0, 1).index_select(0, tables_BHK.flatten()).view(shape)
            for part in self._layers[layer]
        )
        return keys, values


class Fp8Cache(KVCache):
    """Keys and values in e4m3 with a scale for each token and head; computation is in `dtype`.

    They are stored as bytes, because torch cannot copy and gather every FP8 type.
    """

    def __init__(
        self,
        config: DecoderConfig | CacheShape,
        *,
        block_tokens: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = {"block_tokens": block_tokens, "max_blocks": max_blocks}
        super().__init__(config, **sizes, dtype=torch.uint8, device=device)
        self.dtype = dtype
        shape = (2, 0, config.num_kv_heads, block_tokens)
        self._scales = [torch.zeros(shape, device=device) for _ in range(config.num_layers)]
        self._kept = [self._layers, self._scales]

    def write(self, layer: int, slots: Tensor, k_NHd: Tensor, v_NHd: Tensor) -> None:
        parts = zip(self.store(layer), self._scales[layer].flatten(1), (k_NHd, v_NHd), strict=True)
        for values, scales, x_NHd in parts:
            found = quantise(x_NHd.flatten(0, 1), block=(1, None))
            values.index_copy_(0, slots, found.values.view(torch.uint8))
            scales.index_copy_(0, slots, found.scales.flatten())

    def rows(self, layer: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, L, d] of the first rows, dequantised."""
        keys, values = (
            self._numbers(part[:num_rows, :, :length], scales[:num_rows, :, :length])
            for part, scales in zip(self._layers[layer], self._scales[layer], strict=True)
        )
        return keys, values

    def gather(self, layer: int, tables_BHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, K * block_tokens, d], dequantised."""
        shape, chosen = (*tables_BHK.shape[:2], -1), tables_BHK.flatten()
        keys, values = (
            self._numbers(
                part.flatten(0, 1).index_select(0, chosen).view(*shape, part.shape[-1]),
                scales.flatten(0, 1).index_select(0, chosen).view(shape),
            )
            for part, scales in zip(self._layers[layer], self._scales[layer], strict=True)
        )
        return keys, values

    def _numbers(self, values: Tensor, scales: Tensor) -> Tensor:
        return (values.view(E4M3).float() * scales[..., None]).to(self.dtype)
