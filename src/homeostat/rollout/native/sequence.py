"""A flight of the native engine: how much of it is cached, and its noise.

The first `cached` of its tokens have keys and values in `blocks`. What is not cached is computed
next: one token by decoding, more by prefill. A sequence that loses its blocks keeps its tokens, and
is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from homeostat.rollout.engine import Request
from homeostat.rollout.flight import Flight
from homeostat.rollout.noise import noise_key

# Session, tokens, and the experts of those that are known; None where they are not asked for.
ShareKey = tuple[str, bytes, bytes | None]


class Sequence(Flight):
    """A request that the scheduler manages."""

    def __init__(
        self,
        request: Request,
        *,
        number: int,
        now: float,
        decode: Callable[[Items[int]], str] | None,
    ) -> None:
        super().__init__(request, number=number, now=now, decode=decode)
        # Sequences with one key may share the computation of their prompt. The scheduler sets it
        # whenever the sequence begins to wait.
        self.share_key: ShareKey | None = None
        self.noise_key = noise_key(request.seed, request.noise_name)
        self.blocks: list[int] = []
        self.cached = 0
        # Number of the commit whose weights the cache was begun with.
        self.cached_by = 0

    def sharing_key(self) -> ShareKey | None:
        """Return the key of those with whom it could share its prompt if it began now.

        Where experts are asked for, the prompt's must be recorded, and those that are known
        already must be the same.
        """
        request = self.request
        if request.session_key is None:
            return None
        known = None if self.routes is None else self.routes.fingerprint(self.num_prompt)
        return (request.session_key, request.tokens_T.tobytes(), known)

    @property
    def uncached(self) -> int:
        return len(self.tokens) - self.cached
