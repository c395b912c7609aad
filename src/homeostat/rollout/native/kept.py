"""Cached keys and values that outlive their request, for the next turn of its session.

    request ends, keep_cache -> keep -> find(next request of the session) -> fork its blocks

A prefix is stored under the policy and the session of its request. It owns its blocks as a sequence
does, and they are never written to. It uses only free room: the scheduler evicts the least recently
used prefix when it needs blocks, and drops all of them when weights change or the cache is freed.
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
    """Tokens whose keys and values are in `blocks`.

    `routes_TLK` are the experts that they went to, if the request asked for them.
    """

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
        """Return the number of tokens that a sequence can take over.

        The last token of the sequence is not among them, because its hidden state predicts the next
        one. If the sequence asks for experts, those of the tokens must be known.
        """
        shared = min(self.num_shared(tokens_T), len(tokens_T) - 1)
        if sequence.routes is None:
            return shared
        if self.routes_TLK is None:
            return 0
        return min(shared, sequence.routes.num_equal(self.routes_TLK))


class KeptPrefixes:
    """All kept prefixes, the least recently used one first."""

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
        """Return the prefix that shares most tokens with the sequence, and how many are usable."""
        known = self._sessions.get(session_of(sequence) or ("", ""), [])
        tokens_T = np.array(sequence.tokens) if known else np.zeros(0, dtype=np.int64)
        best, most = None, 0
        for prefix in known:
            usable = prefix.num_usable(sequence, tokens_T)
            if usable > most:
                best, most = prefix, usable
        if best is None:
            return None
        # This makes it the most recently used one.
        del self._by_use[best]
        self._by_use[best] = None
        return best, most


def session_of(sequence: Sequence) -> SessionKey | None:
    key = sequence.request.session_key
    return None if key is None else (sequence.request.policy_id, key)
