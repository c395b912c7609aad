"""Decoding on a CPU in bursts: the compiled step (step/) makes several steps without any Python.

    start(sequences) -> the burst is made -> take() -> what it drew

A burst ends with the step in which a sequence ends, so that nothing is computed in vain (other
parts of the batch may be a step ahead or behind, because each has its own thread), and takes
a fraction of a second at most, so that time limits are kept.

Suffixes: `_B` sequences, `_K` blocks of a sequence, `_S` steps of a burst.
"""

from __future__ import annotations

import time

import numpy as np

from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.rollout.kept import packed
from homeostat.rollout.native.bursts import Reserve, Taken, TakenCut
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.cpu.compiled import CompiledModel, block_tables
from homeostat.rollout.native.cpu.prompts import CpuPrompts
from homeostat.rollout.native.routing import route_arrays, routes_in
from homeostat.rollout.native.sampler import noise_of
from homeostat.rollout.native.sequence import Sequence

# The longest burst, in steps and in seconds as far as the last ones tell.
MAX_STEPS = 32
MAX_SECONDS = 0.25


class CpuBursts:
    spare_blocks = 0
    warmup_s = 0.0

    def __init__(self, compiled: CompiledModel) -> None:
        self.compiled = compiled
        self.prompts = CpuPrompts(compiled)
        self.num_steps = 0
        self.sequences: list[Sequence] = []
        self._taken: Taken | None = None
        self._step_s = MAX_SECONDS

    @property
    def is_flying(self) -> bool:
        return self._taken is not None

    def start(
        self, sequences: list[Sequence], cache: KVCache, reserve: Reserve, *, until: float
    ) -> None:
        """Make a burst of these sequences, each with one token that is not cached."""
        assert self._taken is None, "the last burst was not taken"
        self.sequences = sequences
        wanted = self._wanted(until - time.monotonic())
        # Where there is no room for more, there is room for one: the scheduler saw to it.
        num_steps = wanted if reserve(sequences, wanted) else 1
        started = time.perf_counter()
        self._taken = self._made(cache, num_steps)
        made = int(self._taken.made_B.max())
        self._step_s = (time.perf_counter() - started) / made
        self.num_steps += made

    def take(self, cache: KVCache, reserve: Reserve, *, may_go_on: bool) -> Taken:
        """Return what the burst drew. The next one begins once the host has ended finished ones."""
        del cache, reserve, may_go_on
        assert self._taken is not None, "no burst was made"
        taken, self._taken = self._taken, None
        return taken

    def drop(self) -> None:
        """Forget the burst: its tokens will be drawn again, and come out the same."""
        self._taken = None

    def rest(self) -> None:
        """Free the copies of weights; the next burst makes them again."""
        self.compiled.rest()

    def _wanted(self, left_s: float) -> int:
        """Return the number of steps: at least one, and no more than there is time for."""
        if any(sequence.request.sampling.stop_strings for sequence in self.sequences):
            return 1
        left = min(sequence.max_length - len(sequence.tokens) for sequence in self.sequences)
        return max(1, min(left, MAX_STEPS, int(min(MAX_SECONDS, left_s) / self._step_s)))

    def _made(self, cache: KVCache, num_steps: int) -> Taken:
        moe, routes_BSLK, cut = self.compiled.moe, None, None
        room = route_arrays(self.sequences, moe, num_steps, len(self.sequences))
        arrays = _arrays(self.sequences, num_steps) | room
        is_cut = any(sequence.is_cut for sequence in self.sequences)
        if is_cut:
            arrays |= _cut_arrays(self.sequences, num_steps, vocabulary=self.compiled.vocabulary)
        self.compiled.run(cache, arrays, num_rows=len(self.sequences), num_steps=num_steps)
        if moe is not None and room:
            routes_BSLK = routes_in(room, moe).swapaxes(0, 1)
        if is_cut:
            sizes_BS, ids_SBK = arrays["sizes"].T, arrays["kept"]
            values = packed(ids_SBK, np.minimum(sizes_BS, ids_SBK.shape[2]))
            cut = TakenCut(arrays["sampled_logps"].T, sizes_BS, values)
        return Taken(
            self.sequences, arrays["drawn"].T, arrays["logps"].T, arrays["made"], routes_BSLK, cut
        )


def _arrays(sequences: list[Sequence], num_steps: int) -> dict[str, np.ndarray]:
    """Make the arrays that the burst reads and writes."""
    num_rows = len(sequences)
    sampling = [sequence.request.sampling for sequence in sequences]
    temperature_B = np.array([one.temperature for one in sampling])
    stops = frozenset().union(*(one.stop_ids for one in sampling))
    return {
        "tokens": np.array([sequence.tokens[-1] for sequence in sequences], dtype=np.int32),
        "positions": np.array([sequence.cached for sequence in sequences], dtype=np.int32),
        "sequences": np.arange(num_rows, dtype=np.int32),
        "tables": block_tables(sequences),
        "greedy": (temperature_B == 0).astype(np.int32),
        "stops": np.array(sorted(stops), dtype=np.int32),
        "scale": (1.0 / np.where(temperature_B > 0, temperature_B, 1.0)).astype(np.float32),
        "noise": noise_of(sequences, num_steps=num_steps),
        "drawn": np.zeros((num_steps, num_rows), dtype=np.int32),
        "logps": np.zeros((num_steps, num_rows), dtype=np.float32),
        "made": np.zeros(num_rows, dtype=np.int32),
    }


def _cut_arrays(
    sequences: list[Sequence], num_steps: int, *, vocabulary: int
) -> dict[str, np.ndarray]:
    """Make the arrays by which distributions are cut, and those of what was kept."""
    num_rows, width = len(sequences), min(vocabulary, MAX_KEPT_IDS)
    sampling = [sequence.request.sampling for sequence in sequences]
    return {
        "is_cut": np.array([sequence.is_cut for sequence in sequences], dtype=np.int32),
        "top_k": np.array(
            [min(one.top_k or vocabulary, vocabulary) for one in sampling], dtype=np.int32
        ),
        "top_p": np.array([one.top_p for one in sampling], dtype=np.float64),
        "min_p": np.array([one.min_p for one in sampling], dtype=np.float64),
        "sampled_logps": np.zeros((num_steps, num_rows), dtype=np.float32),
        "sizes": np.zeros((num_steps, num_rows), dtype=np.int32),
        "kept": np.empty((num_steps, num_rows, width), dtype=np.int32),
    }
