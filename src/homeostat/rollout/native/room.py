"""The memory budget of an engine's cache, and its division into blocks.

The budget is a share of the memory that was free when it was measured; a request that could not be
served by all of it is refused when it comes.
"""

from __future__ import annotations

import torch

from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.build import Model
from homeostat.rollout.native.blocks import BlockPool
from homeostat.rollout.native.cache import Fp8Cache, KVCache, token_bytes
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.native.sequence import Sequence

# Tokens of a block; in rows, where a sequence is one block, its size is a multiple of this.
BLOCK_TOKENS = 16


class CacheRoom:
    """The memory budget of a cache, in blocks.

    If `in_rows`, a block fits the longest sequence. `spare_blocks` are not in the pool.
    """

    def __init__(
        self,
        model: Model,
        config: NativeEngineConfig,
        *,
        device: torch.device,
        max_tokens: int,
        in_rows: bool,
        spare_blocks: int,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.max_tokens = max_tokens
        self.in_rows = in_rows
        self.spare_blocks = spare_blocks
        self.measure()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.output_weight().dtype

    def measure(self) -> None:
        self.budget_bytes = int(self.config.memory_share * free_bytes(self.device))

    def holds(self, num_tokens: int) -> bool:
        """Return whether a sequence of so many tokens could be served."""
        return self._bytes(num_tokens) <= self.budget_bytes

    def require(self, sequence: Sequence) -> None:
        need = self._bytes(sequence.max_length)
        if not self.holds(sequence.max_length):
            raise EngineError(
                f"request {sequence.request.id!r} cannot be served: the cache of its up to "
                f"{sequence.max_length} tokens takes {need / 1e9:.3g} GB, and the engine may have "
                f"{self.budget_bytes / 1e9:.3g} GB. Raise engine.memory_share, or lower "
                "rollout.max_new_tokens or data.max_length."
            )

    def fits(self, cache: KVCache, longest: int) -> bool:
        return not self.in_rows or longest <= cache.block_tokens

    def make(self, longest: int) -> tuple[BlockPool, KVCache]:
        """Make blocks for sequences of up to `longest` tokens; memory is taken as they are used."""
        block_tokens = _rounded(longest) if self.in_rows else BLOCK_TOKENS
        affordable = self.budget_bytes // (block_tokens * self._token_bytes)
        useful = self.config.max_concurrency * -(-self.max_tokens // block_tokens)
        num_blocks = min(affordable, useful) + self.spare_blocks
        pool = BlockPool(num_blocks)
        for _ in range(self.spare_blocks):
            pool.alloc()
        cache = (Fp8Cache if self._is_fp8 else KVCache)(
            self.model.config,
            block_tokens=block_tokens,
            max_blocks=num_blocks,
            dtype=self.dtype,
            device=self.device,
        )
        return pool, cache

    @property
    def _is_fp8(self) -> bool:
        return self.config.kv_cache_dtype == "fp8"

    @property
    def _token_bytes(self) -> int:
        return token_bytes(self.model.config, self.dtype, is_fp8=self._is_fp8)

    def _bytes(self, num_tokens: int) -> int:
        return _rounded(num_tokens) * self._token_bytes


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
