"""The experts of the tokens in a forward pass of the engine: replayed where known, then recorded.

    routing_of(chunks) -> forward -> keep_routes(chunks, routing.recorded())

A sequence that lost its cache is computed again: its tokens go to the experts that they went to
before. Tokens of requests that do not ask for experts are routed freely, and nothing is kept.

Suffixes: `_N` packed tokens of a pass, `_L` layers with experts, `_K` slots.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from homeostat.models.routing import Routing, smallest_dtype
from homeostat.ops.moe_shape import MoeShape
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.scheduler import Chunk
from homeostat.rollout.native.sequence import Sequence


def wants_routes(sequences: Items[Sequence]) -> bool:
    return any(sequence.routes is not None for sequence in sequences)


def has_known_routes(chunks: list[Chunk]) -> bool:
    """Return whether tokens of the pass have been run before."""
    return any(_num_known(chunk) for chunk in chunks)


def routing_of(shape: MoeShape | None, chunks: list[Chunk], *, device: torch.device) -> Routing:
    """Return the routing of a pass over these tokens, in this order."""
    if not wants_routes([chunk.sequence for chunk in chunks]):
        return Routing()
    assert shape is not None, "capabilities refuse the request of a model without experts"
    if not has_known_routes(chunks):
        return Routing(records=True)
    num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
    replayed_NLK = np.zeros((num_tokens, len(shape.layers), shape.top_k), dtype=np.int64)
    free_N = np.ones(num_tokens, dtype=bool)
    at = 0
    for chunk in chunks:
        count = _num_known(chunk)
        if count and chunk.sequence.routes is not None:
            routes_TLK = chunk.sequence.routes.first(chunk.start + count)
            replayed_NLK[at : at + count] = routes_TLK[chunk.start :]
            free_N[at : at + count] = False
        at += chunk.end - chunk.start
    return Routing(to_device(replayed_NLK, device), to_device(free_N, device), records=True)


def routes_dtype(shape: MoeShape) -> np.dtype:
    """Return the smallest integer type that holds the number of every expert."""
    return torch.empty(0, dtype=smallest_dtype(shape.num_experts)).numpy().dtype


def recorded(routing: Routing, shape: MoeShape) -> np.ndarray:
    """Return [N, L, K] in the smallest integer type, on the host."""
    return routing.recorded().to(smallest_dtype(shape.num_experts)).cpu().numpy()


def keep_routes(chunks: list[Chunk], routes_NLK: np.ndarray) -> None:
    """Hand the recorded experts of a pass to its sequences."""
    at = 0
    for chunk in chunks:
        size = chunk.end - chunk.start
        if chunk.sequence.routes is not None:
            chunk.sequence.routes.put(chunk.start, routes_NLK[at : at + size])
        at += size


def _num_known(chunk: Chunk) -> int:
    routes = chunk.sequence.routes
    return 0 if routes is None else max(0, min(routes.num_known, chunk.end) - chunk.start)
