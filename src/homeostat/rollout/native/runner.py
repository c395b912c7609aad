"""Runs the model over a plan's tokens and gives the hidden states that predict the next ones.

Suffixes: `_N` packed tokens, `_B` sequences, `_C` chunks, `_D` model dim.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from homeostat.models.decoder import Decoder
from homeostat.rollout.native.attention import DecodeAttention, PrefillAttention
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.scheduler import Chunk, Copy
from homeostat.rollout.native.sequence import Sequence


class Runner:
    """One model over a cache. It advances `cached` of the sequences it computed."""

    def __init__(self, model: Decoder, *, in_rows: bool) -> None:
        self.model = model
        self.cache: KVCache | None = None
        self.in_rows = in_rows
        self.num_forwards = 0
        self.num_prefilled = 0

    def copy(self, copies: list[Copy], *, extent: int) -> None:
        """Gives the first `extent` blocks memory, and copies between them."""
        cache = self._cache()
        cache.reserve(extent)
        cache.copy(copies)

    def prefill(self, chunks: list[Chunk]) -> tuple[list[Sequence], Tensor]:
        """The sequences that are cached whole now, and the hidden state of each one's end."""
        cache = self._cache()
        # Equal lengths as neighbours: packed attention takes them as one batch.
        chunks = sorted(chunks, key=lambda chunk: (chunk.start > 0, chunk.end - chunk.start))
        tokens_N = [token for c in chunks for token in c.sequence.tokens[c.start : c.end]]
        positions_N = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        hidden_ND = self.model.hidden_in(
            to_device(np.array(tokens_N), cache.device),
            to_device(positions_N, cache.device),
            PrefillAttention(cache, chunks, kernel=self.model.kernel),
        )
        self.num_forwards += 1
        self.num_prefilled += len(tokens_N)
        whole: list[Sequence] = []
        last: list[int] = []
        for chunk, end in zip(chunks, accumulate(c.end - c.start for c in chunks), strict=True):
            chunk.sequence.cached = chunk.end
            if chunk.sequence.uncached == 0:
                whole.append(chunk.sequence)
                last.append(end - 1)
        return whole, hidden_ND[to_device(np.array(last, dtype=np.int64), cache.device)]

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """[B, D]: the hidden state of each sequence's last token."""
        cache = self._cache()
        dtype = self.model.output_weight().dtype
        attention = DecodeAttention(cache, sequences, dtype=dtype, in_rows=self.in_rows)
        tokens_B = np.array([sequence.tokens[-1] for sequence in sequences])
        hidden_BD = self.model.hidden_in(
            to_device(tokens_B, cache.device), attention.positions_B, attention
        )
        self.num_forwards += 1
        for sequence in sequences:
            sequence.cached += 1
        return hidden_BD

    def _cache(self) -> KVCache:
        assert self.cache is not None, "the engine makes a cache before it plans a step"
        return self.cache
