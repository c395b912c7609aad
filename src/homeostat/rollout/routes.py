"""The experts to which the engine routed the tokens of a request.

    Routes(request) -> put(start, routes) after each pass -> completed: columns of the completion

The experts of a token are known after an engine computed it, and never change then: if its cache is
computed again, with the same or other weights, they are replayed, so that the cache and the
returned routes agree. The last token of a request is never computed and has no experts.

Routes are one array: expert numbers, or records of (expert, weight) where a request asks for the
weights of the experts as well (`joined`). They come back as two columns.

Suffixes: `_T` tokens of a request, `_L` layers with experts, `_K` slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from homeostat.columns import ColumnArray, dense, split
from homeostat.errors import EngineError
from homeostat.rollout.engine import Request
from homeostat.types import Author, Segment

COLUMN = "routed_experts"
WEIGHTS = "routed_weights"
# Fields of a record.
_EXPERT, _WEIGHT = "expert", "weight"


def joined(experts: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return experts with their weights as one array; the experts alone where there are none."""
    if weights is None:
        return experts
    records = np.empty(experts.shape, dtype=[(_EXPERT, experts.dtype), (_WEIGHT, np.float32)])
    records[_EXPERT], records[_WEIGHT] = experts, weights
    return records


def experts_in(routes: np.ndarray) -> np.ndarray:
    """Return the expert numbers of routes."""
    return routes[_EXPERT] if routes.dtype.names else routes


def weights_in(routes: np.ndarray) -> np.ndarray | None:
    """Return the weights of routes; None where only experts were recorded."""
    return routes[_WEIGHT] if routes.dtype.names else None


class Routes:
    """The experts of the first `num_known` tokens of a request, and their weights if it asks."""

    def __init__(self, request: Request) -> None:
        self.has_weights = request.routed_weights
        given = _given(request)
        # The last token that was given holds no experts: nobody had run it yet.
        self.num_known = max(sum(map(len, given)) - 1, 0)
        self._values_TLK = np.concatenate(given) if given else None

    def first(self, num_tokens: int) -> np.ndarray:
        """Return [T, L, K] of the first tokens, a view. All of them are known."""
        assert num_tokens <= self.num_known, (num_tokens, self.num_known)
        assert self._values_TLK is not None, "nothing was recorded"
        return self._values_TLK[:num_tokens]

    def put(self, start: int, routes_TLK: np.ndarray) -> None:
        """Record the experts of tokens from `start` on. Experts that are known already do not
        change.
        """
        end = start + len(routes_TLK)
        assert start <= self.num_known, f"tokens {self.num_known} to {start} were left out"
        if end <= self.num_known:
            return
        new_TLK = self._as_asked(routes_TLK[self.num_known - start :])
        self._reserve(end, like=new_TLK)[self.num_known : end] = new_TLK
        self.num_known = end

    def fingerprint(self, num_tokens: int) -> bytes:
        """Return bytes that are equal if the same experts are known for this many tokens."""
        known = min(num_tokens, self.num_known)
        kind = WEIGHTS.encode() if self.has_weights else b""
        return kind + (self.first(known).tobytes() if known else b"")

    def num_equal(self, others_TLK: np.ndarray) -> int:
        """Number of leading tokens that others' recorded experts could stand for."""
        if self.has_weights and weights_in(others_TLK) is None:
            return 0
        others_TLK = self._as_asked(others_TLK)
        count = min(self.num_known, len(others_TLK))
        if not count:
            return len(others_TLK)
        differs_T = (self.first(count) != others_TLK[:count]).any(axis=(1, 2))
        return int(differs_T.argmax()) if differs_T.any() else len(others_TLK)

    def completed(
        self, segments: tuple[Segment, ...], *, num_prompt: int
    ) -> tuple[tuple[Segment, ...], dict[str, ColumnArray]]:
        """Return the segments with the column, and the columns of the prompt before them.

        Without any new token, not all of what was begun may have been run: that has no column, or
        the one it came with.
        """
        lengths = np.array([num_prompt, *(len(segment.tokens_T) for segment in segments)])
        num_run = int(lengths.sum()) - 1
        if self.num_known < num_run or self._values_TLK is None:
            return segments, {}
        column_TLK = np.zeros((num_run + 1, *self._values_TLK.shape[1:]), self._values_TLK.dtype)
        column_TLK[:num_run] = self.first(num_run)
        prompt, *parts = (_columns(dense(part)) for part in split(column_TLK, lengths))
        with_routes = tuple(
            replace(segment, columns={**segment.columns, **part})
            for segment, part in zip(segments, parts, strict=True)
        )
        return with_routes, prompt

    def _as_asked(self, routes_TLK: np.ndarray) -> np.ndarray:
        """Return routes without weights if the request does not ask for them."""
        if not self.has_weights:
            return experts_in(routes_TLK)
        assert routes_TLK.dtype.names, "no weights were recorded"
        return routes_TLK

    def _reserve(self, num_tokens: int, *, like: np.ndarray) -> np.ndarray:
        values = self._values_TLK
        if values is None:
            values = np.zeros((0, *like.shape[1:]), dtype=like.dtype)
        assert values.shape[1:] == like.shape[1:], f"{values.shape[1:]} layers and slots were given"
        if num_tokens > len(values):
            grown = np.zeros((max(num_tokens, 2 * len(values)), *values.shape[1:]), values.dtype)
            grown[: self.num_known] = values[: self.num_known]
            values = grown
        self._values_TLK = values
        return values


def _columns(routes_TLK: np.ndarray) -> dict[str, ColumnArray]:
    """Return routes as the columns of a segment or a prompt."""
    columns: dict[str, ColumnArray] = {COLUMN: np.ascontiguousarray(experts_in(routes_TLK))}
    weights_TLK = weights_in(routes_TLK)
    if weights_TLK is not None:
        columns[WEIGHTS] = np.ascontiguousarray(weights_TLK)
    return columns


def why_not_resumable(request: Request) -> str | None:
    """Return why the experts of the tokens that a request begins with are not known."""
    segments = _run_segments(request)
    if not segments:
        return None
    for column in _asked(request):
        noun = column.removeprefix("routed_")
        what = "routed experts" if column == COLUMN else "the weights of experts"
        if any(column not in segment.columns for segment in segments):
            return f"it asks for {what}, and those of the tokens that it begins with are unknown"
        prompt, num_prompt = request.prompt_columns.get(column), len(request.tokens_T)
        if prompt is None or len(prompt) != num_prompt:
            return (
                f"it asks for {what} and begins with sampled tokens: prompt_columns must hold the "
                f"{noun} of its {num_prompt} prompt tokens, as the completion did that it resumes; "
                f"it has {'none' if prompt is None else len(prompt)}"
            )
    return None


def require_shape(request: Request, *, num_layers: int, num_slots: int) -> None:
    """Raise EngineError if the experts that a request begins with are of another model."""
    for routes_TLK in _given(request):
        if routes_TLK.shape[1:] != (num_layers, num_slots):
            raise EngineError(
                f"request {request.id!r} cannot be served: the experts that it begins with are of "
                f"{routes_TLK.shape[1]} layers with {routes_TLK.shape[2]} slots each, and the "
                f"model has {num_layers} with {num_slots}. It resumes what another model sampled."
            )


def _given(request: Request) -> list[np.ndarray]:
    """Return what an earlier request recorded of the prompt and of what it sampled."""
    asked = _asked(request)
    if not all(column in request.prompt_columns for column in asked):
        return []
    columns = [request.prompt_columns, *(s.columns for s in _run_segments(request))]
    return [
        joined(dense(one[COLUMN]), dense(one[WEIGHTS]) if WEIGHTS in asked else None)
        for one in columns
    ]


def _asked(request: Request) -> tuple[str, ...]:
    """Return the columns that the request asks for."""
    return (COLUMN, WEIGHTS) if request.routed_weights else (COLUMN,)


def _run_segments(request: Request) -> tuple[Segment, ...]:
    """Return the segments that an engine ran: up to the last one that it sampled."""
    sampled = [
        place
        for place, segment in enumerate(request.begun)
        if segment.author is Author.ENGINE and len(segment.tokens_T)
    ]
    return request.begun[: sampled[-1] + 1] if sampled else ()
