"""The sets that the tokens of a request were drawn from, where its distribution is cut.

    KeptIds(request) -> put(sets) after each draw -> column: of the completion's new tokens

The trainer computes log-probs over the same sets (ops/kept_sets.py), so a set is returned whole or
not at all: one of more than `MAX_KEPT_IDS` ids ends the run with what to change. A token that was
drawn from the whole vocabulary has an empty set, which costs nothing.
"""

from __future__ import annotations

import numpy as np

from homeostat.columns import KEPT_IDS, MAX_KEPT_IDS, Ragged, concatenate
from homeostat.errors import EngineError
from homeostat.rollout.engine import Request
from homeostat.types import Author


class KeptIds:
    """The sets of the tokens that a request has sampled so far."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._parts = [Ragged.of([], np.int32)]

    def put(self, sets: Ragged) -> None:
        """Take the sets of the next tokens. Raises EngineError if one is too large to return."""
        require_bounded(self._request, sets.sizes_T)
        self._parts.append(sets)

    def column(self) -> Ragged:
        """Return the sets of all tokens that were put."""
        whole = concatenate(self._parts)
        assert isinstance(whole, Ragged), "all parts are ragged"
        self._parts = [whole]
        return whole


def why_not_resumable(request: Request) -> str | None:
    """Say why the sets of what a request has begun with are not known."""
    sampled = (segment for segment in request.begun if segment.author is Author.ENGINE)
    if all(KEPT_IDS in segment.columns for segment in sampled if len(segment.tokens_T)):
        return None
    return "it asks for kept ids, and those of the tokens that it begins with are unknown"


def padded_sets(ids_BSK: np.ndarray, sizes_T: np.ndarray) -> Ragged:
    """Return the sets of rows of tokens, in order; each is padded to one width."""
    width = int(sizes_T.max(initial=0))
    # Cut before anything is copied: most sets are far smaller than the room for them.
    ids_TK = ids_BSK[:, :, :width].reshape(len(sizes_T), width)
    values = ids_TK[np.arange(width) < sizes_T[:, None]]
    offsets_T = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes_T, dtype=np.int64)])
    return Ragged(values.astype(np.int32, copy=False), offsets_T)


def part_of(sets: Ragged, start: int, stop: int) -> Ragged:
    """Return the sets of tokens [start, stop)."""
    offsets_T = sets.offsets_T[start : stop + 1]
    return Ragged(sets.values[offsets_T[0] : offsets_T[-1]], offsets_T - offsets_T[0])


def require_bounded(request: Request, sizes_T: np.ndarray) -> None:
    """Raise EngineError if a token was drawn from more ids than can be returned."""
    size = int(sizes_T.max(initial=0))
    if size <= MAX_KEPT_IDS:
        return
    sampling = request.sampling
    raise EngineError(
        f"request {request.id!r}: a token was drawn from {size:,} ids (rollout.top_p="
        f"{sampling.top_p:g}, rollout.min_p={sampling.min_p:g}), and at most {MAX_KEPT_IDS:,} can "
        f"be replayed in training. Set rollout.top_k to {MAX_KEPT_IDS} or less, which bounds the "
        "set, or lower rollout.top_p or rollout.temperature."
    )
