"""The experts of the tokens in a forward pass of the engine: replayed where known, then recorded.

    routing_of(chunks) -> forward -> keep_routes(chunks, recorded(routing))

A sequence that lost its cache is computed again: its tokens go to the experts that they went to
before, with the weights that they had, where these were recorded. Tokens of requests that do not
ask for experts are routed freely, and nothing is kept.

Suffixes: `_N` packed tokens of a pass, `_L` layers with experts, `_K` slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
import torch

from homeostat.models.routing import Routing, smallest_dtype
from homeostat.ops.moe_shape import MoeShape
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.scheduler import Chunk
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.routes import experts_in, joined, weights_in


def wants_routes(sequences: Items[Sequence]) -> bool:
    return any(sequence.routes is not None for sequence in sequences)


def wants_weights(sequences: Items[Sequence]) -> bool:
    return any(s.routes is not None and s.routes.has_weights for s in sequences)


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
    size = num_tokens, len(shape.layers), shape.top_k
    replayed_NLK, weights_NLK = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
    free_N = np.ones(num_tokens, dtype=bool)
    # A pass replays the weights of all its known tokens, or of none.
    with_weights = True
    at = 0
    for chunk in chunks:
        count = _num_known(chunk)
        if count and chunk.sequence.routes is not None:
            routes_TLK = chunk.sequence.routes.first(chunk.start + count)[chunk.start :]
            replayed_NLK[at : at + count] = experts_in(routes_TLK)
            free_N[at : at + count] = False
            own_TLK = weights_in(routes_TLK)
            if own_TLK is None:
                with_weights = False
            else:
                weights_NLK[at : at + count] = own_TLK
        at += chunk.end - chunk.start
    return Routing(
        to_device(replayed_NLK, device),
        to_device(free_N, device),
        records=True,
        weights_NLK=to_device(weights_NLK, device) if with_weights else None,
    )


def routes_dtype(shape: MoeShape) -> np.dtype:
    """Return the smallest integer type that holds the number of every expert."""
    return torch.empty(0, dtype=smallest_dtype(shape.num_experts)).numpy().dtype


def route_arrays(
    sequences: Items[Sequence], shape: MoeShape | None, *size: int
) -> dict[str, np.ndarray]:
    """Return the arrays of `size` that the compiled step writes; none if nobody asks for routes."""
    if shape is None or not wants_routes(sequences):
        return {}
    whole = *size, len(shape.layers), shape.top_k
    arrays: dict[str, np.ndarray] = {"routes": np.zeros(whole, dtype=np.int32)}
    if wants_weights(sequences):
        arrays["route_weights"] = np.zeros(whole, dtype=np.float32)
    return arrays


def routes_in(arrays: Mapping[str, np.ndarray], shape: MoeShape) -> np.ndarray:
    """Return the routes that the compiled step wrote into `route_arrays`."""
    return joined(arrays["routes"].astype(routes_dtype(shape)), arrays.get("route_weights"))


def recorded(routing: Routing, shape: MoeShape, *, with_weights: bool) -> np.ndarray:
    """Return the routes [N, L, K] of a pass on the host, experts in the smallest integer type."""
    experts_NLK = routing.recorded().to(smallest_dtype(shape.num_experts)).cpu().numpy()
    weights_NLK = routing.recorded_weights().cpu().numpy() if with_weights else None
    return joined(experts_NLK, weights_NLK)


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
