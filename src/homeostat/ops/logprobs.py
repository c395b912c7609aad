"""Token log-probabilities: the one function that computes them, for training and for scoring.

    logp[m] = z[m, target[m]] - logsumexp_v z[m, v],      z = hidden @ weight.T / temperature

Invariant: full logits never exist. The [M, V] problem is cut into tiles of at most `VOCAB_CHUNK`
vocabulary entries and as many tokens as `chunk_bytes` holds in fp32; one tile is alive at a time,
and the backward pass computes the tiles again. All sums are fp32 whatever the input dtype.

Vocabulary chunks are the outer loop, so that a chunk of the weight's gradient is summed over all
tokens in fp32 before it is rounded, once, to the weight's dtype.

Suffixes: `_M` predicted tokens, `_V` vocabulary, `_D` model dim, `_C` vocabulary chunks; a tile is
named for its own rows and columns, `_mv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

VOCAB_CHUNK = 8192


def token_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int,
) -> Tensor:
    """fp32 [M]: the log-probability of each target under the hidden state that predicts it."""
    assert temperature > 0, f"temperature {temperature}"
    assert hidden_MD.shape == (targets_M.shape[0], weight_VD.shape[1]), (
        f"hidden {tuple(hidden_MD.shape)}, weight {tuple(weight_VD.shape)}, "
        f"targets {tuple(targets_M.shape)}"
    )
    return _TokenLogprobs.apply(hidden_MD, weight_VD, targets_M, 1.0 / temperature, chunk_bytes)


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps one fp32 number per token; backward computes the tiles again from it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        scale: float,
        chunk_bytes: int,
    ) -> Tensor:
        num_tokens = targets_M.shape[0]
        num_chunks = -(-weight_VD.shape[0] // VOCAB_CHUNK)
        lse_CM = hidden_MD.new_empty((num_chunks, num_tokens), dtype=torch.float32)
        target_logit_M = hidden_MD.new_zeros(num_tokens, dtype=torch.float32)
        for chunk, (first, weight_vD) in enumerate(_vocab_chunks(weight_VD)):
            for rows in _token_tiles(num_tokens, chunk_bytes, width=weight_vD.shape[0]):
                tile_mv = _logits(hidden_MD[rows], weight_vD, scale)
                at_m, inside_m = _target_columns(targets_M[rows], first, tile_mv.shape[1])
                picked_m = tile_mv.gather(1, at_m[:, None]).squeeze(1)
                target_logit_M[rows] += picked_m.where(inside_m, 0.0)
                lse_CM[chunk, rows] = _logsumexp_(tile_mv)
        lse_M = lse_CM.logsumexp(0)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, lse_M)
        ctx.scale, ctx.chunk_bytes = scale, chunk_bytes
        return target_logit_M - lse_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, lse_M = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_M = grads[0] * ctx.scale
        dhidden_MD = torch.zeros_like(hidden_MD, dtype=torch.float32) if needs_hidden else None
        dweight_VD = torch.empty_like(weight_VD) if needs_weight else None
        for first, weight_vD in _vocab_chunks(weight_VD):
            width = weight_vD.shape[0]
            dweight_vD = weight_vD.new_zeros(weight_vD.shape, dtype=torch.float32)
            for rows in _token_tiles(targets_M.shape[0], ctx.chunk_bytes, width=width):
                tile_mv = _logits(hidden_MD[rows], weight_vD, ctx.scale)
                tile_mv.sub_(lse_M[rows, None]).exp_()
                at_m, inside_m = _target_columns(targets_M[rows], first, width)
                tile_mv.scatter_add_(1, at_m[:, None], -inside_m[:, None].float())
                # The operands of a matrix product share a dtype; its sums stay fp32. The upstream
                # gradient goes to the narrow side, which saves a pass over the tile.
                tile_mv = tile_mv.to(weight_vD.dtype)
                if dhidden_MD is not None:
                    dhidden_MD[rows] -= _mm(tile_mv, weight_vD) * grad_M[rows, None]
                if dweight_VD is not None:
                    upstream_mD = (hidden_MD[rows] * grad_M[rows, None]).to(weight_vD.dtype)
                    dweight_vD -= _mm(tile_mv.t(), upstream_mD)
            if dweight_VD is not None:
                dweight_VD[first : first + width] = dweight_vD
        dhidden = None if dhidden_MD is None else dhidden_MD.to(hidden_MD.dtype)
        return dhidden, dweight_VD, None, None, None


def _vocab_chunks(weight_VD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of the weight, in the dtype that matrix products are done in."""
    native = _multiplies_into_fp32(weight_VD)
    for first in range(0, weight_VD.shape[0], VOCAB_CHUNK):
        weight_vD = weight_VD[first : first + VOCAB_CHUNK]
        yield first, weight_vD if native else weight_vD.float()


def _token_tiles(num_tokens: int, chunk_bytes: int, *, width: int) -> Iterator[slice]:
    height = max(1, chunk_bytes // (4 * width))
    for start in range(0, num_tokens, height):
        yield slice(start, min(start + height, num_tokens))


def _logits(hidden_mD: Tensor, weight_vD: Tensor, scale: float) -> Tensor:
    tile_mv = _mm(hidden_mD.to(weight_vD.dtype), weight_vD.t())
    return tile_mv if scale == 1.0 else tile_mv.mul_(scale)


def _multiplies_into_fp32(tensor: Tensor) -> bool:
    """fp32 needs no care; on CUDA half-precision operands can be summed into an fp32 result."""
    return tensor.dtype == torch.float32 or (
        tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)
    )


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def _target_columns(targets_m: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """The target's column in this chunk and whether it lies there; no device synchronisation."""
    local_m = targets_m - first
    return local_m.clamp(0, width - 1), (local_m >= 0) & (local_m < width)


def _logsumexp_(tile_mv: Tensor) -> Tensor:
    """logsumexp over each row, spending the tile in place: a second tile would double the peak."""
    max_m = tile_mv.amax(1)
    return tile_mv.sub_(max_m[:, None]).exp_().sum(1).log_().add_(max_m)
