"""Computes prompts on a CPU by the compiled step: a row is one token, and nothing is sampled.

The same panels of weights as in a burst serve many rows at a time; keys and values go straight to
the cache.

Suffixes: `_N` packed tokens, `_D` model dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.cpu.compiled import CompiledModel, block_tables
from homeostat.rollout.native.routing import (
    has_known_routes,
    keep_routes,
    route_arrays,
    routes_in,
)
from homeostat.rollout.native.scheduler import Chunk

# Rows at a time: they stay in a core's cache while the weights of a layer pass by.
MAX_ROWS = 256
# Where it is better than a library's products and attention: from so many outputs of a panel on
# (AVX-512), for prompts of up to so many tokens.
MIN_PANEL = 32
MAX_TOKENS = 512


class CpuPrompts:
    def __init__(self, compiled: CompiledModel) -> None:
        self.compiled = compiled

    def are_better(self, chunks: list[Chunk]) -> bool:
        """Return whether the compiled forward pass is faster than the decoder's own.

        Only the decoder can replay experts.
        """
        is_wide = self.compiled.library.panel_width() >= MIN_PANEL
        is_short = max(chunk.end for chunk in chunks) <= MAX_TOKENS
        return is_wide and is_short and not has_known_routes(chunks)

    def hidden_in(
        self, tokens_N: np.ndarray, positions_N: np.ndarray, chunks: list[Chunk], cache: KVCache
    ) -> Tensor:
        """Return [N, D]: `Decoder.hidden_in` of the chunks' tokens, which are cached then, and
        whose experts are recorded."""
        model, moe = self.compiled.model, self.compiled.moe
        sizes = [chunk.end - chunk.start for chunk in chunks]
        columns = {
            "tokens": tokens_N.astype(np.int32),
            "positions": positions_N.astype(np.int32),
            "sequences": np.repeat(np.arange(len(chunks), dtype=np.int32), sizes),
            "hidden": np.empty((len(tokens_N), model.config.hidden_size), dtype=np.float32),
        }
        room = route_arrays([chunk.sequence for chunk in chunks], moe, len(tokens_N))
        columns |= room
        tables_BK = block_tables([chunk.sequence for chunk in chunks])
        for start in range(0, len(tokens_N), MAX_ROWS):
            rows = {name: column[start : start + MAX_ROWS] for name, column in columns.items()}
            num_rows = len(rows["tokens"])
            self.compiled.run(cache, rows | {"tables": tables_BK}, num_rows=num_rows, num_steps=1)
        if moe is not None and room:
            keep_routes(chunks, routes_in(room, moe))
        return model.model.norm(torch.from_numpy(columns["hidden"]))
