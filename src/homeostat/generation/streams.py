"""Requests in an engine, and what each has sampled since it was last asked.

submit(Request) -> advance() -> Progress(tokens), ..., Progress(tokens, completion)
"""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.rollout.engine import Request
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of a request. `completion` is set with the last of them."""

    id: str
    tokens: list[int]
    completion: Completion | None = None


class Streams:
    """The requests that one caller has in the engine. Not safe for several threads."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self._seen: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError where it can never be served."""
        self.engine.submit(request)
        self._seen[request.id] = 0

    def advance(self, *, timeout_s: float) -> list[Progress]:
        """Compute for about `timeout_s`, or until a request ends. Return what is new."""
        finished = self.engine.poll(timeout_s=timeout_s)
        news = [self._last(completion) for completion in finished]
        for id, seen in self._seen.items():
            tokens = list(self.engine.sampled_so_far(id))
            if len(tokens) > seen:
                news.append(Progress(id, tokens[seen:]))
                self._seen[id] = len(tokens)
        return news

    def cancel(self, id: str) -> None:
        """End a request that nobody waits for any more."""
        if self._seen.pop(id, None) is not None:
            self.engine.abort([id])

    def _last(self, completion: Completion) -> Progress:
        seen = self._seen.pop(completion.request_id, 0)
        return Progress(completion.request_id, completion.tokens_T[seen:].tolist(), completion)
