"""Runs the model over a plan's tokens and gives the hidden states that predict the next ones.

Suffixes: `_N` packed tokens, `_B` sequences, `_D` model dim.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from torch import Tensor

from homeostat.models.build import Model
from homeostat.models.decoder import Decoder
from homeostat.models.routing import Routing
from homeostat.ops.attention import AttentionContext
from homeostat.rollout.native.attention import (
    DecodeAttention,
    InvariantAttention,
    PrefillAttention,
)
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.compact import CompactDecoder, compact_of
from homeostat.rollout.native.cpu.prompts import CpuPrompts
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.routing import keep_routes, recorded, routing_of, wants_weights
from homeostat.rollout.native.scheduler import Chunk, Copy
from homeostat.rollout.native.sequence import Sequence


class Runner:
    """One model over a cache. It advances `cached` of the sequences it computed. `path` is the
    decode path (fast.py); `prompts` computes prompts in place of the model, where that is better.
    """

    def __init__(
        self, model: Model, *, in_rows: bool, path: str, prompts: CpuPrompts | None
    ) -> None:
        self.model = model
        self.cache: KVCache | None = None
        self.in_rows = in_rows
        # Compact copies of the weights do what a burst cannot do.
        self.may_copy = path in ("compact", "compiled")
        self.prompts = prompts
        self._compact: CompactDecoder | None = None
        self.num_forwards = 0
        self.num_prefilled = 0

    def copy(self, copies: list[Copy], *, extent: int) -> None:
        """Allocate memory for the first `extent` blocks, and make copies between blocks."""
        cache = self.cache_now()
        cache.reserve(extent)
        cache.copy(copies)

    def prefill(self, chunks: list[Chunk]) -> tuple[list[Sequence], Tensor]:
        """Return the sequences that are fully cached now, and each one's last hidden state."""
        cache = self.cache_now()
        # Equal lengths as neighbours: packed attention takes them as one batch.
        chunks = sorted(chunks, key=lambda chunk: (chunk.start > 0, chunk.end - chunk.start))
        hidden_ND = self._hidden_in(chunks, cache)
        self.num_forwards += 1
        self.num_prefilled += len(hidden_ND)
        whole: list[Sequence] = []
        last: list[int] = []
        for chunk, end in zip(chunks, accumulate(c.end - c.start for c in chunks), strict=True):
            chunk.sequence.cached = chunk.end
            if chunk.sequence.uncached == 0:
                whole.append(chunk.sequence)
                last.append(end - 1)
        return whole, hidden_ND[to_device(np.array(last, dtype=np.int64), cache.device)]

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """Return the hidden state of each sequence's last token, [B, D]."""
        cache = self.cache_now()
        last_B = np.array([(sequence.tokens[-1], sequence.cached) for sequence in sequences])
        tokens_B, positions_B = to_device(last_B.T.copy(), cache.device)
        chunks = [Chunk(sequence, sequence.cached, sequence.cached + 1) for sequence in sequences]
        routing = routing_of(self.model.moe, chunks, device=cache.device)
        attention = self._decode_attention(chunks, positions_B, cache)
        hidden_BD = self._decoder().hidden_in(tokens_B, positions_B, attention, routing=routing)
        self._keep_routes(chunks, routing)
        self.num_forwards += 1
        for sequence in sequences:
            sequence.cached += 1
        return hidden_BD

    def _hidden_in(self, chunks: list[Chunk], cache: KVCache) -> Tensor:
        tokens_N = np.array([t for c in chunks for t in c.sequence.tokens[c.start : c.end]])
        positions_N = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        if self.prompts is not None and self.prompts.are_better(chunks):
            return self.prompts.hidden_in(tokens_N, positions_N, chunks, cache)
        routing = routing_of(self.model.moe, chunks, device=cache.device)
        hidden_ND = self.model.hidden_in(
            to_device(tokens_N, cache.device),
            to_device(positions_N, cache.device),
            self._prefill_attention(chunks, cache),
            routing=routing,
        )
        self._keep_routes(chunks, routing)
        return hidden_ND

    def _keep_routes(self, chunks: list[Chunk], routing: Routing) -> None:
        if routing.records:
            assert self.model.moe is not None, "only models with experts record them"
            with_weights = wants_weights([chunk.sequence for chunk in chunks])
            keep_routes(chunks, recorded(routing, self.model.moe, with_weights=with_weights))

    def _prefill_attention(self, chunks: list[Chunk], cache: KVCache) -> AttentionContext:
        if self.model.numerics == "invariant":
            return InvariantAttention(cache, chunks)
        kernel = self.model.kernel if isinstance(self.model, Decoder) else "sdpa"
        return PrefillAttention(cache, chunks, kernel=kernel)

    def _decode_attention(
        self, chunks: list[Chunk], positions_B: Tensor, cache: KVCache
    ) -> AttentionContext:
        if self.model.numerics == "invariant":
            return InvariantAttention(cache, chunks)
        sequences = [chunk.sequence for chunk in chunks]
        dtype = self.model.output_weight().dtype
        return DecodeAttention(cache, sequences, positions_B, dtype=dtype, in_rows=self.in_rows)

    def rest(self) -> None:
        """Free the copies of weights; the next decoding step makes them again."""
        self._compact = None

    def _decoder(self) -> Model | CompactDecoder:
        """Choose what decodes: a compact copy of the weights if enabled and supported, else the
        model itself."""
        if not self.may_copy or not isinstance(self.model, Decoder):
            return self.model
        if self._compact is None or not self._compact.is_of(self.model):
            self._compact = compact_of(self.model)
        return self._compact or self.model

    def cache_now(self) -> KVCache:
        assert self.cache is not None, "the engine makes a cache before it plans a step"
        return self.cache
