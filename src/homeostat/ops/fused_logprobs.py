"""`token_logprobs` with Triton kernels, which read a tile of logits once after its product.

The tiles, their bounds and the sums are those of ops/logprobs.py, which is the reference. The
forward pass keeps the partial sums of each chunk of the vocabulary; the backward pass recomputes a
tile and turns it into the operand of the next two products. Both kinds of tile together stay within
`chunk_bytes`.

The sums of a row over a chunk are computed by one program, and chunks are added in order. So the
only other requirement of `invariant` numerics is a product whose rows do not depend on each other.

Suffixes: as in ops/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.kernels.logits import Chunks, logit_gradients
from homeostat.ops.linear import Numerics, tiled_product
from homeostat.ops.logit_tiles import Entropy, product, tile_height, token_tiles, vocab_chunks

# Matrix products tile their rows by this, so a smaller remainder costs as much.
_ROWS = 128


class FusedTokenLogprobs(torch.autograd.Function):
    """Token log-probs whose forward pass keeps one or two fp32 numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        scale: float,
        chunk_bytes: int,
        numerics: Numerics,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = targets_M.shape[0]
        targets_M = targets_M.contiguous()
        scale_M = hidden_MD.new_full((num_tokens,), scale, dtype=torch.float32)
        chunks = Chunks.of(weight_VD.shape[0], scale_M)
        for first, weight_vD in vocab_chunks(weight_VD):
            for rows in _tiles(num_tokens, chunk_bytes, row_bytes=4 * weight_vD.shape[0]):
                hidden_mD = hidden_MD[rows].to(weight_vD.dtype)
                if numerics == "invariant":
                    tile_mv = tiled_product(hidden_mD, weight_vD, out_dtype=torch.float32)
                else:
                    tile_mv = product(hidden_mD, weight_vD.t())
                chunks.add(tile_mv, targets_M, rows, first=first)
        totals = chunks.totals()
        lse_M = totals.lse()
        entropy_M = None if entropy is Entropy.NONE else totals.entropy()
        ctx.scale, ctx.chunk_bytes = scale, chunk_bytes
        if entropy is Entropy.VALUE:
            ctx.mark_non_differentiable(entropy_M)
        kept_M = entropy_M if entropy is Entropy.GRAD else None
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, lse_M, kept_M)
        return chunks.target_M - lse_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, lse_M, entropy_M = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_M, entropy_grad_M = grads
        # Without the entropy the upstream gradient is a common factor of a token's logits.
        narrow_M = grad_M * ctx.scale if entropy_M is None else torch.full_like(grad_M, ctx.scale)
        upstream = None
        if entropy_M is not None:
            upstream = (grad_M.contiguous(), entropy_grad_M.contiguous(), entropy_M)
        dhidden_MD = torch.zeros_like(hidden_MD, dtype=torch.float32) if needs_hidden else None
        dweight_VD = torch.empty_like(weight_VD) if needs_weight else None
        scaled_MD = hidden_MD * narrow_M[:, None] if needs_weight else None
        for first, weight_vD in vocab_chunks(weight_VD):
            width, dtype = weight_vD.shape[0], weight_vD.dtype
            dweight_vD = None
            if dweight_VD is not None:
                dweight_vD = weight_vD.new_zeros(weight_vD.shape, dtype=torch.float32)
            # The fp32 logits and their gradient in the weight's dtype are alive at the same time.
            row_bytes = width * (4 + dtype.itemsize)
            for rows in _tiles(targets_M.shape[0], ctx.chunk_bytes, row_bytes=row_bytes):
                tile_mv = product(hidden_MD[rows].to(dtype), weight_vD.t())
                dlogits_mv = torch.empty_like(tile_mv, dtype=dtype)
                place = {"first": first, "scale": ctx.scale}
                logit_gradients(tile_mv, targets_M, lse_M, upstream, dlogits_mv, rows, **place)
                if dhidden_MD is not None:
                    dhidden_MD[rows] += product(dlogits_mv, weight_vD)
                if scaled_MD is not None and dweight_vD is not None:
                    dweight_vD += product(dlogits_mv.t(), scaled_MD[rows].to(dtype))
            if dweight_VD is not None and dweight_vD is not None:
                dweight_VD[first : first + width] = dweight_vD
        dhidden = None
        if dhidden_MD is not None:
            # The common factor is applied once after all chunks, in fp32.
            dhidden = dhidden_MD.mul_(narrow_M[:, None]).to(hidden_MD.dtype)
        return dhidden, dweight_VD, None, None, None, None, None


def _tiles(num_tokens: int, chunk_bytes: int, *, row_bytes: int) -> Iterator[slice]:
    """Return as few tiles as the bytes allow, of about equal height, without a small remainder."""
    most = tile_height(chunk_bytes, row_bytes)
    num_tiles = max(1, -(-num_tokens // most))
    height = -(-num_tokens // (num_tiles * _ROWS)) * _ROWS
    return token_tiles(num_tokens, max(1, min(most, height)))
