"""Cached keys and values that outlive their request, for the next turn of its session.

    request ends, keep_cache -> keep -> find(next request of the session) -> fork its blocks

A prefix is kept under the policy and the session of its request. It owns its blocks like a sequence
does, and nobody writes to them. It takes only room that nobody else wants: the scheduler evicts the
least recently used one when it needs blocks, and drops all of them with new weights or the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import IntArray
from homeostat.rollout.native.sequence import Sequence

SessionKey = tuple[str, str]


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """Tokens whose keys and values are in `blocks`. `routes_TLK`: the experts that they went to,
    where the request asked for them."""

    session: SessionKey
    tokens_T: IntArray
    blocks: list[int]
    routes_TLK: np.ndarray | None = None

    def num_shared(self, tokens_T: IntArray) -> int:
        """Return the number of tokens at its start that the others share."""
        length = min(len(self.tokens_T), len(tokens_T))
        differ_T = self.tokens_T[:length] != tokens_T[:length]
        return int(differ_T.argmax()) if differ_T.any() else length

    def num_usable(self, sequence: Sequence, tokens_T: IntArray) -> int:
        """Number of tokens that a sequence can take over: all but its last one, whose hidden state
        predicts the next, and with their experts if it asks for them."""
        shared = min(self.num_shared(tokens_T), len(tokens_T) - 1)
        if sequence.routes is None:
            return shared
        if self.routes_TLK is None:
            return 0
        return min(shared, sequence.routes.num_equal(self.routes_TLK))


class KeptPrefixes:
    """All that are kept, the least recently used one first."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, list[KeptPrefix]] = {}
        self._by_use: dict[KeptPrefix, None] = {}

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self) -> Iterator[KeptPrefix]:
        return iter(list(self._by_use))

    def __contains__(self, prefix: KeptPrefix) -> bool:
        return prefix in self._by_use

    def oldest(self) -> KeptPrefix:
        return next(iter(self._by_use))

    def add(self, prefix: KeptPrefix) -> None:
        self._sessions.setdefault(prefix.session, []).append(prefix)
        self._by_use[prefix] = None

    def remove(self, prefix: KeptPrefix) -> None:
        del self._by_use[prefix]
        of_session = self._sessions[prefix.session]
        of_session.remove(prefix)
        if not of_session:
            del self._sessions[prefix.session]

    def extended_by(self, prefix: KeptPrefix) -> list[KeptPrefix]:
        """Return the session's prefixes that the new one begins with, which replaces them."""
        return [
            one
            for one in self._sessions.get(prefix.session, [])
            if one.num_shared(prefix.tokens_T) == len(one.tokens_T)
            and (one.routes_TLK is None or prefix.routes_TLK is not None)
        ]

    def find(self, sequence: Sequence) -> tuple[KeptPrefix, int] | None:
        """Return the prefix that has the most in common with the sequence, and how many tokens it
        can take over."""
        known = self._sessions.get(session_of(sequence) or ("", ""), [])
        tokens_T = np.array(sequence.tokens) if known else np.zeros(0, dtype=np.int64)
        best, most = None, 0
        for prefix in known:
            usable = prefix.num_usable(sequence, tokens_T)
            if usable > most:
                best, most = prefix, usable
        if best is None:
            return None
        # It is the most recently used one now.
        del self._by_use[best]
        self._by_use[best] = None
        return best, most


def session_of(sequence: Sequence) -> SessionKey | None:
    key = sequence.request.session_key
    return None if key is None else (sequence.request.policy_id, key)
