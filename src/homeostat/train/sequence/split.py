"""Deal the tokens of a micro-batch to the ranks that share it.

    rows -> zigzag over cp (chunks r and 2 cp - 1 - r of every row) -> equal parts over sp

Everything in a layer but attention works on each token by itself, so a rank computes its own tokens
only; positions, dropout and recorded routes go with the tokens. A token is computed on one rank.
Ranks hold equally many; where they do not divide a row, copies of real tokens fill it up, which
nothing reads.

All of it follows from the lengths of the rows, so that ranks need not tell each other: a rank knows
whose turn every token is.

Suffixes: `_N` tokens of the batch, `_X` tokens of this rank, `_B` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class SequencePart:
    """This rank's tokens: `index_X` are their places in the batch, and `is_own_X` says which of
    them are not copies that only fill up.

    `place_N` says where in the part each token of the batch is; -1 if it is on another rank.
    `num_joined` tokens are what the ranks of `sp` hold together, without what fills up for them;
    `chunks` are the lengths of the rows' chunks in the ring, empty if there is none.
    """

    index_X: IntArray
    is_own_X: BoolArray
    place_N: IntArray
    num_joined: int
    chunks: tuple[int, ...] = ()

    def mine(self, index_M: IntArray) -> IntArray:
        """Return the given tokens that are on this rank."""
        return index_M[self.place_N[index_M] >= 0]


def part_of_rows(
    lengths_B: IntArray,
    *,
    cp: tuple[int, int] = (1, 0),
    sp: tuple[int, int] = (1, 0),
    by_length: bool = False,
) -> SequencePart:
    """Return the part of a rank; `cp` and `sp` are (size, place) in these dimensions.

    `by_length` puts rows of equal length next to each other.
    """
    (cp_size, place), starts_B = cp, np.cumsum(lengths_B) - lengths_B
    # A row in the ring is 2 x cp chunks; without one it is whole.
    num_chunks = 2 * cp_size if cp_size > 1 else 1
    chunk_B = -(-lengths_B // num_chunks)
    order = np.argsort(chunk_B, kind="stable") if by_length else np.arange(len(lengths_B))
    held = (place, num_chunks - 1 - place) if cp_size > 1 else (0,)
    at = [
        starts_B[row] + np.arange(number * chunk_B[row], (number + 1) * chunk_B[row])
        for row in order
        for number in held
    ]
    ends = np.repeat((starts_B + lengths_B)[order], chunk_B[order] * len(held))
    index_X = np.concatenate(at)
    is_own_X = index_X < ends
    joined = (np.minimum(index_X, ends - 1), is_own_X)
    chunks = tuple(chunk_B[order].tolist()) if cp_size > 1 else ()
    return _shared_out(*joined, sp=sp, num_tokens=int(lengths_B.sum()), chunks=chunks)


def part_of_distinct(unique_U: IntArray, place_N: IntArray, *, sp: tuple[int, int]) -> SequencePart:
    """Return the part of a rank if equal prompts are computed once.

    `unique_U` are the places of the distinct tokens, `place_N` says which of them each token is.
    """
    found = _shared_out(
        unique_U, np.ones(len(unique_U), dtype=bool), sp=sp, num_tokens=len(place_N)
    )
    return SequencePart(
        found.index_X, found.is_own_X, found.place_N[unique_U][place_N], found.num_joined
    )


def _shared_out(
    index_T: IntArray,
    is_own_T: BoolArray,
    *,
    sp: tuple[int, int],
    num_tokens: int,
    chunks: Sequence[int] = (),
) -> SequencePart:
    """Deal tokens to the ranks of `sp` in equal runs."""
    size, place = sp
    each = -(-len(index_T) // size)
    added = size * each - len(index_T)
    mine = slice(place * each, (place + 1) * each)
    index_X = np.concatenate([index_T, np.full(added, index_T[-1])])[mine]
    is_own_X = np.concatenate([is_own_T, np.zeros(added, dtype=bool)])[mine]
    place_N = np.full(num_tokens, -1, dtype=np.int64)
    place_N[index_X[is_own_X]] = np.flatnonzero(is_own_X)
    return SequencePart(index_X, is_own_X, place_N, len(index_T), tuple(chunks))
