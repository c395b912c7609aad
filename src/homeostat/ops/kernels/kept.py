"""Log-probs over kept sets in one pass, and weighted sums of rows for their gradients.

One program has a token: it multiplies the hidden state with the weights of its kept ids, a tile of
ids at a time, and keeps running sums relative to the largest logit so far. Tiles begin with the
set, so the bits of a token depend on nothing but the token and its set. One program has a bag and a
part of its columns, and adds its rows in order.

Suffixes: `_C` tokens, `_P` pairs of a token and an id that it kept, `_B` bags, `_R` rows of a
table, `_D` model dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import aligned, block_of, launches

# Ids and inputs that a program multiplies at a time; rows and columns that it adds.
_IDS, _INPUTS = 32, 128
_ROWS, _COLUMNS = 8, 1024


@triton.jit(do_not_specialize=["width"])
def _kept_sums(
    hidden_ptr, weight_ptr, targets_ptr, ids_ptr, starts_ptr, ends_ptr, scale_ptr,
    z_ptr, target_ptr, lse_ptr, entropy_ptr, width,
    HAS_Z: tl.constexpr, IDS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_ptr + token), tl.load(ends_ptr + token)
    target, scale = tl.load(targets_ptr + token), tl.load(scale_ptr + token)
    zero = scale * 0.0
    # Not minus infinity: the sums before the first tile are 0, and infinity times 0 is no number.
    top, total, dot, chosen = zero - 1e30, zero, zero, zero
    for first in range(start, end, IDS):
        at_p = first + tl.arange(0, IDS)
        is_in = at_p < end
        ids = tl.load(ids_ptr + at_p, mask=is_in, other=0)
        z = tl.zeros((IDS,), tl.float32)
        for begin in range(0, width, INPUTS):
            at_d = begin + tl.arange(0, INPUTS)
            is_dim = at_d < width
            h = tl.load(hidden_ptr + token * width + at_d, mask=is_dim, other=0.0).to(tl.float32)
            at = ids.to(tl.int64)[:, None] * width + at_d[None, :]
            w = tl.load(weight_ptr + at, mask=is_in[:, None] & is_dim[None, :], other=0.0)
            z += tl.sum(w.to(tl.float32) * h[None, :], 1)
        z = z * scale
        if HAS_Z:
            tl.store(z_ptr + at_p, z, mask=is_in)
        chosen += tl.sum(tl.where(is_in & (ids == target), z, 0.0), 0)
        z = tl.where(is_in, z, float("-inf"))
        larger = tl.maximum(top, tl.max(z, 0))
        # Sums so far are relative to the largest logit before this tile.
        shift = top - larger
        weights = tl.exp(z - larger)
        shrunk = tl.exp(shift)
        dot = shrunk * (dot + shift * total)
        dot += tl.sum(tl.where(is_in, weights * tl.where(is_in, z - larger, 0.0), 0.0), 0)
        total = shrunk * total + tl.sum(weights, 0)
        top = larger
    tl.store(target_ptr + token, chosen)
    tl.store(lse_ptr + token, top + tl.log(total))
    tl.store(entropy_ptr + token, tl.log(total) - dot / total)


def kept_sums(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    ids_P: Tensor,
    starts_C: Tensor,
    ends_C: Tensor,
    scale_C: Tensor,
    *,
    with_logits: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the pairs' logits [P], and of each token the target's logit, logsumexp and entropy.

    The ids of token c are `ids_P[starts_C[c] : ends_C[c]]`. Without `with_logits` the first is
    empty.
    """
    num_tokens = len(targets_C)
    z_P = scale_C.new_empty(len(ids_P) if with_logits else 0)
    target_C, lse_C, entropy_C = (scale_C.new_empty(num_tokens) for _ in range(3))
    if launches(target_C):
        _kept_sums[(num_tokens,)](
            aligned(hidden_CD), aligned(weight_VD), targets_C, ids_P, starts_C, ends_C, scale_C,
            z_P, target_C, lse_C, entropy_C, hidden_CD.shape[1],
            HAS_Z=with_logits, IDS=_IDS, INPUTS=_INPUTS, num_warps=4,
        )  # fmt: skip
    return z_P, target_C, lse_C, entropy_C


@triton.jit(do_not_specialize=["width"])
def _bag_sums(
    table_ptr, index_ptr, offsets_ptr, factor_ptr, out_ptr, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    at_d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_dim = at_d < width
    start, end = tl.load(offsets_ptr + bag), tl.load(offsets_ptr + bag + 1)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start, end, ROWS):
        at_p = first + tl.arange(0, ROWS)
        is_in = at_p < end
        index = tl.load(index_ptr + at_p, mask=is_in, other=0).to(tl.int64)
        factor = tl.load(factor_ptr + at_p, mask=is_in, other=0.0)
        at = index[:, None] * width + at_d[None, :]
        rows = tl.load(table_ptr + at, mask=is_in[:, None] & is_dim[None, :], other=0.0)
        sums += tl.sum(rows.to(tl.float32) * factor[:, None], 0)
    tl.store(out_ptr + bag * width + at_d, sums.to(out_ptr.dtype.element_ty), mask=is_dim)


def bag_sums(table_RD: Tensor, index_P: Tensor, offsets_B: Tensor, factor_P: Tensor) -> Tensor:
    """Return [B, D] in the table's dtype, summed in fp32: of each bag, its rows times factors."""
    num_bags, width = len(offsets_B) - 1, table_RD.shape[1]
    out_BD = torch.empty(num_bags, width, dtype=table_RD.dtype, device=table_RD.device)
    if launches(out_BD):
        columns = min(block_of(width), _COLUMNS)
        _bag_sums[(num_bags, triton.cdiv(width, columns))](
            table_RD.contiguous(), index_P, offsets_B, factor_P, out_BD, width,
            ROWS=_ROWS, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return out_BD
