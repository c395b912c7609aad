"""One request in flight: its tokens and their log-probs so far, and how it ends.

    Request -> Flight: append(token) ... -> completion(reason)

Tokens are prompt + completion in one list. Every engine keeps its requests as flights, so that
stop tokens, stop strings, limits and segments mean the same in all of them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from homeostat.columns import KEPT_IDS, Columns, split
from homeostat.rollout.engine import Request
from homeostat.rollout.kept import KeptIds
from homeostat.rollout.routes import Routes
from homeostat.rollout.stops import StopStrings
from homeostat.types import Author, Completion, Segment, StopReason


class Flight:
    """The state of one request. `number` is its place in the order of arrival."""

    def __init__(
        self,
        request: Request,
        *,
        number: int,
        now: float,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        sampling = request.sampling
        begun = [token for segment in request.begun for token in segment.tokens_T.tolist()]
        self.request = request
        self.number = number
        # Arrays: a list of numbers takes far longer to become a tensor when all end at once.
        self.tokens = array("q", request.tokens_T.tolist() + begun)
        self.num_prompt = len(request.tokens_T)
        self.num_given = len(self.tokens)
        # Tokens that a tool or user wrote do not count towards the limit of tokens that the policy
        # samples.
        self.max_length = self.num_prompt + num_by_others(request.begun) + sampling.max_new_tokens
        self._policy_since = self.num_given - _num_last_by_policy(request.begun)
        self.expires = None if request.deadline_s is None else now + request.deadline_s
        self.is_cut = sampling.is_cut
        # The sets that tokens were drawn from, where the request asks for them.
        self.kept = KeptIds(request) if request.kept_ids and self.is_cut else None
        self._logps = array("f")
        self._sampled_logps = array("f")
        self._versions: list[tuple[int, int]] = []
        # The experts of the tokens that were run, where the request asks for them.
        self.routes = Routes(request) if request.routed_experts else None
        self._stops = None
        if sampling.stop_strings:
            assert decode is not None, "stop strings need a way to turn tokens into text"
            self._stops = StopStrings(sampling.stop_strings, decode)

    @property
    def num_new(self) -> int:
        """Tokens of the completion: the position of the next one in its noise."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_fresh(self) -> bool:
        """True if the flight has no tokens besides its prompt."""
        return len(self.tokens) == self.num_prompt

    def given_end(self) -> StopReason | None:
        """The stop reason if `begun` was complete already, so that nothing is left to sample."""
        if self.request.begun and self.request.begun[-1].author is Author.ENGINE:
            return self._end()
        return StopReason.LENGTH if len(self.tokens) >= self.max_length else None

    def append(
        self, token: int, logp: float, sampled_logp: float, *, version: int
    ) -> StopReason | None:
        """Append a sampled token. Returns the stop reason if it was the last one."""
        self._mark(version)
        self.tokens.append(token)
        self._logps.append(logp)
        if self.is_cut:
            self._sampled_logps.append(sampled_logp)
        return self._end()

    def extend(
        self,
        tokens: Sequence[int],
        logps: Sequence[float],
        sampled_logps: Sequence[float],
        *,
        version: int,
    ) -> StopReason | None:
        """Append sampled tokens up to the one that ends the request. Returns the stop reason if one
        did.
        """
        if self._stops is None and self.request.sampling.stop_ids.isdisjoint(tokens):
            # Only its length can end it, so all tokens are appended at once: one by one would take
            # the host far longer.
            self._mark(version)
            count = min(len(tokens), self.max_length - len(self.tokens))
            self.tokens.extend(tokens[:count])
            self._logps.extend(logps[:count])
            if self.is_cut:
                self._sampled_logps.extend(sampled_logps[:count])
            return self._end()
        for token, logp, sampled in zip(tokens, logps, sampled_logps, strict=True):
            reason = self.append(token, logp, sampled, version=version)
            if reason is not None:
                return reason
        return None

    def completion(self, reason: StopReason) -> Completion:
        request, segments = self.request, self.request.begun + self._segments()
        columns: Columns = request.prompt_columns
        if self.routes is not None:
            segments, found = self.routes.completed(segments, num_prompt=self.num_prompt)
            columns = {**columns, **found}
        return Completion(request.id, segments, reason, columns)

    def _mark(self, version: int) -> None:
        """Record that this weight version samples the next tokens."""
        if not self._versions or self._versions[-1][1] != version:
            self._versions.append((len(self._logps), version))

    def _end(self) -> StopReason | None:
        if self.tokens[-1] in self.request.sampling.stop_ids:
            return StopReason.STOP
        # A stop string that a tool wrote does not end the completion.
        if self._stops is not None and self._stops.found(self.tokens, since=self._policy_since):
            return StopReason.STOP_STRING
        return StopReason.LENGTH if len(self.tokens) >= self.max_length else None

    def _segments(self) -> tuple[Segment, ...]:
        ends = [start for start, _ in self._versions[1:]] + [len(self._logps)] * bool(self._logps)
        tokens_T = np.array(self.tokens[self.num_given :], dtype=np.int64)
        logp_T = np.array(self._logps, dtype=np.float32)
        sampled_T = np.array(self._sampled_logps, dtype=np.float32) if self.is_cut else logp_T
        starts = [start for start, _ in self._versions]
        columns: list[Columns] = [{} for _ in starts]
        if self.kept is not None and starts:
            whole = self.kept.column()
            parts = [whole] if len(starts) == 1 else split(whole, np.subtract(ends, starts))
            columns = [{KEPT_IDS: part} for part in parts]
        return tuple(
            Segment(
                tokens_T[start:end],
                logp_T[start:end],
                policy_version=version,
                policy_id=self.request.policy_id,
                sampled_logp_T=sampled_T[start:end] if self.is_cut else None,
                columns=own,
            )
            for (start, version), end, own in zip(self._versions, ends, columns, strict=True)
        )


def num_by_others(segments: Sequence[Segment]) -> int:
    """Number of tokens that a tool or user wrote."""
    return sum(len(s.tokens_T) for s in segments if s.author is not Author.ENGINE)


def _num_last_by_policy(segments: Sequence[Segment]) -> int:
    """Number of tokens that the policy sampled after the last one that somebody else wrote."""
    last = itertools.takewhile(lambda segment: segment.author is Author.ENGINE, reversed(segments))
    return sum(len(segment.tokens_T) for segment in last)
