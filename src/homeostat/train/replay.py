"""Replay the routes that the engine recorded (R3): from the columns of a batch to its Routing.

    routed_experts [N, L, K], routed_weights [N, L, K]  ->  checked against the model  ->  Routing

Rollout routing replay: engine and trainer round differently, so that a router may send a token to
other experts in training than when it was sampled, and its log-prob jumps. With replay the token
goes to the engine's experts. Routes are checked before they are used, and never guessed: a batch
without routes is not replayed, and one whose routes do not fit the model is refused.

Suffixes: `_N` packed tokens, `_L` layers with experts, `_K` slots of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homeostat.columns import ROUTES, ColumnArray, Ragged, Stored, dense
from homeostat.config.moe import ReplayMode
from homeostat.errors import ReplayError
from homeostat.models.routing import Routing
from homeostat.ops.moe_shape import MoeShape
from homeostat.types import TrainBatch

EXPERTS, WEIGHTS = ROUTES
# Columns that a run replays, by model.moe.router_replay.
REPLAYED: dict[ReplayMode, tuple[str, ...]] = {
    "off": (),
    "ids": (EXPERTS,),
    "weights": ROUTES,
}


def why_unfit(name: str, values: ColumnArray, moe: MoeShape) -> str:
    """Return why recorded routes cannot be this model's; '' if they can.

    Of a column that is stored elsewhere the shape is checked, and its values when they are read.
    """
    assert not isinstance(values, Ragged), "routes are dense: [tokens, layers, slots]"
    _, num_layers, num_slots = values.shape
    if num_layers != len(moe.layers):
        return f"they cover {num_layers} layers, but {len(moe.layers)} layers have experts"
    if num_slots != moe.top_k:
        return f"they have {num_slots} experts for each token, but the model chooses {moe.top_k}"
    if isinstance(values, Stored):
        return ""
    array_NLK = dense(values)
    if name == WEIGHTS:
        is_fine = bool(np.isfinite(array_NLK).all()) and not bool((array_NLK < 0).any())
        return "" if is_fine else "a weight is negative or not finite"
    odd_NLK = (array_NLK < 0) | (array_NLK >= moe.num_experts)
    if not odd_NLK.any():
        return ""
    token, layer, slot = (int(places[0]) for places in np.nonzero(odd_NLK))
    return (
        f"token {token} went to expert {array_NLK[token, layer, slot]} in layer {layer} of those "
        f"with experts, which has {moe.num_experts}"
    )


def replayed_columns(batch: TrainBatch) -> dict[str, NDArray[Any]]:
    """Return the recorded routes of a batch, read if they are stored elsewhere; often none."""
    return {name: dense(batch.columns[name]) for name in ROUTES if name in batch.columns}


def replaying(
    routes: Mapping[str, NDArray[Any]],
    batch: TrainBatch,
    moe: MoeShape | None,
    *,
    send: Callable[[np.ndarray], Tensor],
) -> Routing:
    """Return the routing that repeats the routes of a batch. Raises ReplayError if it cannot."""
    if moe is None:
        raise ReplayError("routes were recorded, but the model has no experts to replay them with.")
    for name, values in routes.items():
        if len(values) != batch.num_tokens:
            raise ReplayError(
                f"{name}: routes of {len(values)} tokens for a batch of {batch.num_tokens}."
            )
        why = why_unfit(name, values, moe)
        if why:
            raise ReplayError(
                f"{name}: {why}. They were recorded with another model, or damaged; rows "
                f"{batch.row_ids_B[:8].tolist()} and others."
            )
    free_N = np.zeros(batch.num_tokens, dtype=bool)
    # No engine computes the last token of a row.
    free_N[np.cumsum(batch.lengths_B) - 1] = True
    weights_NLK = routes.get(WEIGHTS)
    return Routing(
        send(routes[EXPERTS]),
        send(free_N),
        weights_NLK=None if weights_NLK is None else send(weights_NLK),
    )


def portions(
    batches: Sequence[TrainBatch], *, per_round: int, max_bytes: int
) -> list[Sequence[TrainBatch]]:
    """Cut micro-batches into runs of whole rounds that have at most so many bytes of stored routes.

    Whoever sends batches to other processes reads what is stored: a run at a time. A single round
    may have more.
    """
    found: list[list[TrainBatch]] = []
    held = 0
    for start in range(0, len(batches), per_round):
        one = list(batches[start : start + per_round])
        size = sum(_stored_bytes(batch) for batch in one)
        if found and held + size <= max_bytes:
            found[-1] += one
            held += size
        else:
            found.append(one)
            held = size
    return list(found)


def _stored_bytes(batch: TrainBatch) -> int:
    stored = (batch.columns.get(name) for name in ROUTES)
    return sum(values.nbytes for values in stored if isinstance(values, Stored))


def replay_sums(
    routing: Routing, batch: TrainBatch, *, total: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return what a pass adds to the update's sums: tokens replayed, and routes compared.

    `total` makes a sum over all tokens of the batch of one over those that were computed here.
    """
    reads = routing.reads
    assert isinstance(reads.num_same, Tensor), "a pass that replays compares"
    assert isinstance(reads.num_compared, Tensor), "a pass that replays compares"
    count = torch.full_like(reads.num_same, batch.num_tokens, dtype=torch.float32)
    return {
        "replay_tokens": count,
        "replay_replayed": count - batch.num_rows,
        "replay_compared": total(reads.num_compared.float()),
        "replay_same": total(reads.num_same.float()),
    }
