"""Memory of a rank that shares its micro-batches: its part of one, and what it exchanges.

Everything that a micro-batch keeps for its backward pass grows with the tokens, so that a rank
needs as much as for a batch of its own tokens alone; on top is what is being sent between ranks
while one layer's attention is computed.
"""

from __future__ import annotations

from homeostat.columns import dense
from homeostat.config.mesh import Mesh
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.train.sequence.heads import repeats
from homeostat.types import TokenRow, TrainBatch


def share_of(batch: TrainBatch, num_ranks: int) -> TrainBatch:
    """Return a batch as large as the part that each of so many ranks computes: every n-th token."""
    if num_ranks == 1:
        return batch
    every = slice(None, None, num_ranks)
    return TrainBatch.of(
        [
            TokenRow(
                row.row_id,
                row.tokens_T[every],
                row.weights_T[every],
                {name: dense(values)[every] for name, values in row.columns.items()},
            )
            for row in batch.rows()
        ]
    )


def exchanged_bytes(shape: DecoderConfig, mesh: Mesh, *, num_tokens: int, item_bytes: int) -> int:
    """Return the bytes that one layer's attention holds for other ranks, for a rank's tokens.

    Ulysses: q, k and v as sent, received and cut to heads, and the result twice. A ring: keys and
    values here and coming, and, in the backward pass, the gradients of all three in fp32, those of
    keys and values twice.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    total = 0
    if mesh.sp > 1:
        keys *= repeats(shape.num_kv_heads, mesh.sp)
        total += (3 * (queries + 2 * keys) + 2 * queries) * item_bytes
    if mesh.cp > 1:
        total += 2 * 2 * keys * item_bytes + 4 * (queries + 2 * 2 * keys)
    return num_tokens * total
