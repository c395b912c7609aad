"""Decoding in bursts: several steps at a time, without the host in between.

    start(sequences) -> [take() -> what the oldest burst drew] ... until nothing is in flight

Tokens are sampled by `cuda.bursts` or `cpu.bursts`; the engine sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.rollout.kept import KeptIds
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.sequence import Sequence

if TYPE_CHECKING:
    from homeostat.rollout.native.cpu.prompts import CpuPrompts

# Makes room for so many more tokens of each sequence; returns False if there is none.
Reserve = Callable[[list[Sequence], int], bool]


@dataclass(frozen=True, slots=True)
class Taken:
    """The tokens that a burst drew for its sequences: [B, S], of which the first `made` count.

    `routes_BSLK` holds, for each step, the experts of the token that it computed (the one before
    the token that it drew) in the smallest integer type, and their weights if a sequence asks for
    them (rollout/routes.py). It is None if no sequence asks for experts. `cut` is set if top-k,
    top-p or min-p applies to a sequence.
    """

    sequences: list[Sequence]
    tokens_BS: np.ndarray
    logps_BS: np.ndarray
    made_B: np.ndarray
    routes_BSLK: np.ndarray | None = None
    cut: TakenCut | None = None


@dataclass(frozen=True)
class TakenCut:
    """The results of a burst with cut distributions, beside its tokens.

    `sampled_logps_BS` are log-probs over the kept words, and `sizes_BS` the number of kept ids (0:
    all of them). `values` are the ids themselves, ascending, row by row without gaps, at most
    `MAX_KEPT_IDS` of each set.
    """

    sampled_logps_BS: np.ndarray
    sizes_BS: np.ndarray
    values: np.ndarray

    def give(self, kept: KeptIds, row: int, num_tokens: int) -> None:
        """Give the kept sets of a row's first tokens. Raises EngineError if one is too large."""
        if self._largest > MAX_KEPT_IDS:
            kept.require_bounded(int(self.sizes_BS[row, :num_tokens].max(initial=0)))
        start = row * self.sizes_BS.shape[1]
        stop, ends = start + num_tokens, self._ends
        kept.put(self.values[ends[start] : ends[stop]], self._sizes_T[start:stop])

    @cached_property
    def _largest(self) -> int:
        return int(self.sizes_BS.max(initial=0))

    @cached_property
    def _sizes_T(self) -> np.ndarray:
        return np.minimum(self.sizes_BS, MAX_KEPT_IDS).astype(np.int32).reshape(-1)

    @cached_property
    def _ends(self) -> list[int]:
        """Return where the ids of each token end, as a list: single numbers are read from it."""
        return [0, *np.cumsum(self._sizes_T).tolist()]


class Bursts(Protocol):
    """The interface of a burst decoder.

    `num_steps`: the number of steps made so far. `sequences`: those of the bursts in flight.
    `spare_blocks`: how many blocks of the cache, from block 0 on, must belong to no sequence.
    `prompts`: the object that may compute prompts in place of the decoder.
    """

    spare_blocks: int
    num_steps: int
    sequences: list[Sequence]

    @property
    def prompts(self) -> CpuPrompts | None: ...

    @property
    def is_flying(self) -> bool: ...

    @property
    def warmup_s(self) -> float:
        """Return the seconds spent on compiling kernels and capturing graphs."""
        ...

    def start(
        self, sequences: list[Sequence], cache: KVCache, reserve: Reserve, *, until: float
    ) -> None:
        """Start the first burst. Each of the sequences has one token that is not cached yet.

        `until` is the time, on the monotonic clock, by which the caller wants its results.
        """
        ...

    def take(self, cache: KVCache, reserve: Reserve, *, may_go_on: bool) -> Taken:
        """Return the tokens of the oldest burst. `may_go_on`: another may be started after it."""
        ...

    def drop(self) -> None:
        """Discard the bursts in flight. Their tokens will be sampled again, and be the same."""
        ...

    def rest(self) -> None:
        """Release copies of the weights, which may change from now on."""
        ...
