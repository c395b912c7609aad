"""The compiled step (step/) with the weights of a model, laid out when they are first needed.

Bursts (bursts.py) and prompts (prompts.py) are computed by it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np

from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.ops.moe_shape import MoeShape
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.cpu.weights import PackedWeights
from homeostat.rollout.native.sequence import Sequence

_COUNTS = (
    "rows",
    "stride",
    "steps",
    "table_width",
    "block_tokens",
    "num_stops",
    "threads",
    "width",
)


class BurstStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in _COUNTS),
        *(
            (name, c_void_p)
            for name in (
                "tokens", "positions", "sequences", "tables", "greedy", "stops", "stores", "scale",
                "noise", "drawn", "logps", "made", "hidden", "routes", "route_weights", "is_cut",
                "top_k", "top_p", "min_p", "sampled_logps", "sizes", "kept",
            )
        ),
    ]  # fmt: skip


class CompiledModel:
    """Computes with copies of the model's weights, in `threads` threads."""

    def __init__(self, model: Decoder, library: ctypes.CDLL, *, threads: int) -> None:
        self.model = model
        self.library = library
        self.threads = threads
        self._weights: PackedWeights | None = None

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    @property
    def moe(self) -> MoeShape | None:
        """Return the shape of the model's experts; None in a dense model."""
        return self.model.moe

    def rest(self) -> None:
        """Free the copies of weights; they are made again when they are needed."""
        self._weights = None

    def run(
        self, cache: KVCache, arrays: dict[str, np.ndarray], *, num_rows: int, num_steps: int
    ) -> None:
        """Compute steps over the arrays, which are read and written in place."""
        stores = np.array(cache.addresses(), dtype=np.int64)
        burst = BurstStruct(
            rows=num_rows,
            stride=num_rows,
            steps=num_steps,
            table_width=arrays["tables"].shape[1],
            block_tokens=cache.block_tokens,
            num_stops=len(arrays["stops"]) if "stops" in arrays else 0,
            threads=self.threads,
            width=arrays["kept"].shape[2] if "kept" in arrays else 0,
            stores=stores.ctypes.data,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        if self._weights is None or not self._weights.is_of(self.model):
            self._weights = PackedWeights(self.model, panel=self.library.panel_width())
        status = self.library.run_burst(ctypes.byref(self._weights.struct), ctypes.byref(burst))
        if status < 0:
            raise EngineError(
                f"out of memory while {num_rows} rows were computed. Lower engine.max_concurrency."
            )


def block_tables(sequences: list[Sequence]) -> np.ndarray:
    """Return int32 [B, K]: the blocks of each sequence."""
    tables_BK = np.zeros((len(sequences), max(len(s.blocks) for s in sequences)), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        tables_BK[row, : len(sequence.blocks)] = sequence.blocks
    return tables_BK
