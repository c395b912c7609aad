"""Decoding in bursts: the device makes several steps without the host, which reads what was
sampled while the device makes the next ones.

    start(sequences) -> [take() -> what the oldest burst drew] ... until nothing is in flight

At most two bursts are in flight: the second begins from what the first leaves on the device. A
sequence that ends in the first is still computed in the second. That work is wasted but harmless:
whatever gets the sequence's blocks is computed later, on the same stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from homeostat.rollout.native.bursts import Reserve, Taken
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.cuda.state import BURST_STEPS, DecodeState, Drawing
from homeostat.rollout.native.cuda.steps import Steps
from homeostat.rollout.native.routing import wants_weights
from homeostat.rollout.native.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Burst:
    num_steps: int
    drawing: Drawing


class CudaBursts:
    # Padding rows write to this block (state.py).
    spare_blocks = 1
    prompts = None

    def __init__(self, state: DecodeState, steps: Steps) -> None:
        self.state = state
        self.steps = steps
        self.num_steps = 0
        self.sequences: list[Sequence] = []
        self._count = 0
        self._is_cut = False
        self._flying: deque[_Burst] = deque()

    @property
    def is_flying(self) -> bool:
        return bool(self._flying)

    @property
    def warmup_s(self) -> float:
        return self.steps.warmup_s

    def start(
        self, sequences: list[Sequence], cache: KVCache, reserve: Reserve, *, until: float
    ) -> None:
        """Start the first burst. Each of the sequences has one token that is not cached yet."""
        # Milliseconds: never too late.
        del until
        assert not self._flying, "the last sequences are still on their way"
        # Capturing a graph runs a first step, which needs a cache to write to.
        self.state.see(cache)
        self.steps.refresh()
        self._is_cut = any(sequence.is_cut for sequence in sequences)
        if self._is_cut:
            self.state.make_cut(self.steps.forward.vocabulary)
        self._count = self.steps.make_ready(len(sequences), is_cut=self._is_cut)
        self.sequences = sequences
        self.state.load(sequences)
        # The scheduler guarantees room for at least one more token.
        wanted = self._wanted()
        self._launch(wanted if reserve(sequences, wanted) else 1, cache)

    def take(self, cache: KVCache, reserve: Reserve, *, may_go_on: bool) -> Taken:
        """Start another burst if that is useful; then wait for the oldest and return its tokens."""
        wanted = self._wanted()
        if may_go_on and wanted > 0 and reserve(self.sequences, self._ahead + wanted):
            self._launch(wanted, cache)
        tokens_SB, logps_SB, routes_SBLK, cut = self._flying.popleft().drawing.wait()
        made_B = np.full(len(self.sequences), len(tokens_SB))
        routes_BSLK = None if routes_SBLK is None else routes_SBLK.swapaxes(0, 1)
        return Taken(self.sequences, tokens_SB.T, logps_SB.T, made_B, routes_BSLK, cut)

    def drop(self) -> None:
        """Discard the bursts in flight. Their tokens will be sampled again, and be the same."""
        self._flying.clear()

    def rest(self) -> None:
        """Keep the memory of weight copies; the next burst fills them again."""
        self.steps.forward.weights_changed()

    @property
    def _ahead(self) -> int:
        return sum(burst.num_steps for burst in self._flying)

    def _wanted(self) -> int:
        """Return the number of steps: until all sequences are complete, at most one burst."""
        left = max(s.max_length - len(s.tokens) for s in self.sequences) - self._ahead
        return min(left, BURST_STEPS)

    def _launch(self, num_steps: int, cache: KVCache) -> None:
        # Making room may have moved the cache.
        self.state.see(cache)
        self.state.prepare(self.sequences, ahead=self._ahead)
        self.steps.run(self._count, num_steps, is_cut=self._is_cut)
        self.num_steps += num_steps
        with_weights = wants_weights(self.sequences)
        drawing = self.state.drawn(
            len(self.sequences), num_steps, with_weights=with_weights, is_cut=self._is_cut
        )
        self._flying.append(_Burst(num_steps, drawing))
