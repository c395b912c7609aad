"""Token log-probabilities: the one function that computes them, for training and for scoring.

    logp[m] = z[m, target[m]] - logsumexp_v z[m, v],      z = cap(hidden @ weight.T) / temperature
    entropy[m] = -sum_v p[m, v] log p[m, v],              p = softmax(z)

cap(x) is c * tanh(x / c) in models with a `soft_cap` c, and x in all others.

Invariant: the full logits never exist. The [M, V] problem is split into tiles of at most
`VOCAB_CHUNK` vocabulary entries and as many tokens as `chunk_bytes` holds in fp32; one tile is
alive at a time (the entropy needs a quarter of another), and the backward pass recomputes the
tiles. All sums are fp32 whatever the input dtype.

In `invariant` numerics a token's log-prob (and entropy) has the same bits whatever other tokens are
computed with it. On the CPU the tiles of the forward pass are `TILE_ROWS` tokens tall whatever
`chunk_bytes` is, the last of them padded; on CUDA their height is free, because product and sums
handle each row separately. The backward pass is the same in both.

Vocabulary chunks are the outer loop, so that a chunk of the weight's gradient is summed over all
tokens in fp32 before it is rounded once to the weight's dtype.

On CUDA the passes over a tile are kernels (ops/fused_logprobs.py); the code here is their
reference, and computes soft caps, which the kernels do not.

Tokens that were drawn from a part of the vocabulary (`kept`) have log-prob and entropy over that
part, by ops/kept_logprobs.py.

Suffixes: `_M` predicted tokens, `_V` vocabulary, `_D` model dim, `_C` vocabulary chunks; a tile is
named for its own rows and columns, `_mv`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.ops.kept_logprobs import kept_logprobs
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.linear import TILE_ROWS, Numerics, tiled_product, widened
from homeostat.ops.logit_tiles import (
    VOCAB_CHUNK,
    Entropy,
    capped_logits,
    product,
    tile_height,
    token_tiles,
    vocab_chunks,
)

# exp is 0 in fp32 below -104, so clamping here changes no probability and avoids 0 * inf.
_LOG_ZERO = -110.0


def token_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int,
    numerics: Numerics = "fast",
    kept: KeptSets | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return fp32 [M]: the log-prob of each target under the hidden state that predicts it."""
    _check(hidden_MD, weight_VD, targets_M, temperature)
    problem = (hidden_MD, weight_VD, targets_M, 1.0 / temperature, soft_cap, chunk_bytes)
    return _compute(problem, numerics, Entropy.NONE, kept)[0]


def token_logprobs_and_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int,
    entropy_grad: bool,
    numerics: Numerics = "fast",
    kept: KeptSets | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return fp32 ([M], [M]): the bits of `token_logprobs`, and the entropy of each distribution.

    Without `entropy_grad` the entropy is a constant, and the backward pass costs nothing more.
    """
    _check(hidden_MD, weight_VD, targets_M, temperature)
    problem = (hidden_MD, weight_VD, targets_M, 1.0 / temperature, soft_cap, chunk_bytes)
    return _compute(problem, numerics, Entropy.GRAD if entropy_grad else Entropy.VALUE, kept)


_Problem = tuple[Tensor, Tensor, Tensor, float, float | None, int]


def _compute(
    problem: _Problem, numerics: Numerics, entropy: Entropy, kept: KeptSets | None
) -> tuple[Tensor, Tensor | None]:
    """Compute tokens with a kept set over that, and all others over the whole vocabulary."""
    if kept is None:
        return _whole(problem, numerics, entropy)
    hidden_MD, weight_VD, targets_M, *sizes = problem
    scale, soft_cap, _ = sizes
    at_C, at_W = kept.at_C, kept.at_W
    how = {"scale": scale, "soft_cap": soft_cap, "entropy": entropy}
    if at_W is None:
        return kept_logprobs(hidden_MD, weight_VD, targets_M, kept, **how)
    parts = (
        kept_logprobs(hidden_MD[at_C], weight_VD, targets_M[at_C], kept, **how),
        _whole((hidden_MD[at_W], weight_VD, targets_M[at_W], *sizes), numerics, entropy),
    )
    order_M = torch.cat([at_C, at_W]).argsort()
    (kept_logp_C, kept_entropy_C), (logp_W, entropy_W) = parts
    logp_M = torch.cat([kept_logp_C, logp_W])[order_M]
    if kept_entropy_C is None or entropy_W is None:
        return logp_M, None
    return logp_M, torch.cat([kept_entropy_C, entropy_W])[order_M]


def _whole(problem: _Problem, numerics: Numerics, entropy: Entropy) -> tuple[Tensor, Tensor | None]:
    *inputs, soft_cap, chunk_bytes = problem
    if kernels.fused(problem[0]) and soft_cap is None:
        from homeostat.ops.fused_logprobs import FusedTokenLogprobs

        return FusedTokenLogprobs.apply(*inputs, chunk_bytes, numerics, entropy)
    return _TokenLogprobs.apply(*problem, numerics, entropy)


def _check(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperature: float) -> None:
    assert temperature > 0, f"temperature {temperature}"
    assert hidden_MD.shape == (targets_M.shape[0], weight_VD.shape[1]), (
        f"hidden {tuple(hidden_MD.shape)}, weight {tuple(weight_VD.shape)}, "
        f"targets {tuple(targets_M.shape)}"
    )


class _TokenLogprobs(torch.autograd.Function):
    """Keep one or two fp32 numbers per token; the backward pass recomputes the tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        scale: float,
        soft_cap: float | None,
        chunk_bytes: int,
        numerics: Numerics,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = targets_M.shape[0]
        num_chunks = -(-weight_VD.shape[0] // VOCAB_CHUNK)
        lse_MC = hidden_MD.new_empty((num_tokens, num_chunks), dtype=torch.float32)
        entropy_MC = None if entropy is Entropy.NONE else torch.empty_like(lse_MC)
        target_logit_M = hidden_MD.new_zeros(num_tokens, dtype=torch.float32)
        # A constant height gives all products one shape, so rows do not depend on the batch.
        height = TILE_ROWS if numerics == "invariant" else None
        for chunk, (first, weight_vD) in enumerate(vocab_chunks(weight_VD)):
            width = weight_vD.shape[0]
            for rows in token_tiles(num_tokens, height or tile_height(chunk_bytes, 4 * width)):
                tile_mv = _logits(hidden_MD[rows], weight_vD, scale, soft_cap, height=height)
                at_m, inside_m = _target_columns(targets_M[rows], first, width)
                picked_m = tile_mv[: len(at_m)].gather(1, at_m[:, None]).squeeze(1)
                # Each target lies in exactly one chunk; the others add 0, without a device sync to
                # find out which.
                target_logit_M[rows] += picked_m.where(inside_m, 0.0)
                lse_m, entropy_m = _normaliser_(tile_mv, with_entropy=entropy_MC is not None)
                lse_MC[rows, chunk] = lse_m[: len(at_m)]
                if entropy_MC is not None:
                    entropy_MC[rows, chunk] = entropy_m[: len(at_m)]
        # Chunks are combined once at the end, in a fixed order, for the same bits in any batch.
        lse_M = lse_MC.logsumexp(1)
        entropy_M = None if entropy_MC is None else _whole_entropy(entropy_MC, lse_MC, lse_M)
        ctx.scale, ctx.soft_cap, ctx.chunk_bytes = scale, soft_cap, chunk_bytes
        if entropy is Entropy.VALUE:
            ctx.mark_non_differentiable(entropy_M)
        kept_M = entropy_M if entropy is Entropy.GRAD else None
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, lse_M, kept_M)
        return target_logit_M - lse_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, lse_M, entropy_M = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_M, entropy_grad_M = grads
        # Without the entropy the upstream gradient is a common factor of a token's logits. Apply
        # it to the smaller operand of the products, which saves a pass over the tile.
        narrow_M = grad_M * ctx.scale if entropy_M is None else torch.full_like(grad_M, ctx.scale)
        dhidden_MD = torch.zeros_like(hidden_MD, dtype=torch.float32) if needs_hidden else None
        dweight_VD = torch.empty_like(weight_VD) if needs_weight else None
        for first, weight_vD in vocab_chunks(weight_VD):
            width = weight_vD.shape[0]
            # Summed over all tokens in fp32 and rounded once: bf16 sums would lose small gradients.
            dweight_vD = weight_vD.new_zeros(weight_vD.shape, dtype=torch.float32)
            for rows in token_tiles(targets_M.shape[0], tile_height(ctx.chunk_bytes, 4 * width)):
                tile_mv = _logits(hidden_MD[rows], weight_vD, ctx.scale, ctx.soft_cap)
                slope_mv = _slope_of_cap(tile_mv, ctx.scale, ctx.soft_cap)
                tile_mv.sub_(lse_M[rows, None])
                at_m, inside_m = _target_columns(targets_M[rows], first, width)
                at_target_m = inside_m.float()
                if entropy_M is None:
                    tile_mv.exp_()
                else:
                    upstream = grad_M[rows], entropy_grad_M[rows], entropy_M[rows]
                    _weigh_(tile_mv, *upstream)
                    at_target_m = at_target_m * grad_M[rows]
                # The tile holds p; subtracting 1 at the target gives minus the gradient of the log-
                # prob.
                tile_mv.scatter_add_(1, at_m[:, None], -at_target_m[:, None])
                if slope_mv is not None:
                    tile_mv.mul_(slope_mv)
                # The operands of a matrix product must share a dtype; its sums stay fp32.
                tile_mv = tile_mv.to(weight_vD.dtype)
                if dhidden_MD is not None:
                    dhidden_MD[rows] -= product(tile_mv, weight_vD) * narrow_M[rows, None]
                if dweight_VD is not None:
                    upstream_mD = (hidden_MD[rows] * narrow_M[rows, None]).to(weight_vD.dtype)
                    dweight_vD -= product(tile_mv.t(), upstream_mD)
            if dweight_VD is not None:
                dweight_VD[first : first + width] = dweight_vD
        dhidden = None if dhidden_MD is None else dhidden_MD.to(hidden_MD.dtype)
        return dhidden, dweight_VD, *[None] * 6


def _logits(
    hidden_mD: Tensor,
    weight_vD: Tensor,
    scale: float,
    soft_cap: float | None,
    *,
    height: int | None = None,
) -> Tensor:
    """Return a tile of z. With a `height`, rows of zeros fill it up to a constant shape.

    The last chunk of a vocabulary may have a single entry, whose product would be a matrix-vector
    product: its sums depend on a row's place (as with OpenBLAS on aarch64), so it is widened.
    """
    width = weight_vD.shape[0]
    if height is not None:
        hidden_mD = functional.pad(hidden_mD, (0, 0, 0, height - hidden_mD.shape[0]))
        weight_vD = widened(weight_vD)
    hidden_mD = hidden_mD.to(weight_vD.dtype)
    if height is not None and kernels.fused(hidden_mD):
        tile_mv = tiled_product(hidden_mD, weight_vD, out_dtype=torch.float32)
    else:
        tile_mv = product(hidden_mD, weight_vD.t())
    tile_mv = tile_mv[:, :width].contiguous()
    if soft_cap is not None:
        tile_mv = capped_logits(
            tile_mv, soft_cap, numerics="fast" if height is None else "invariant"
        )
    return tile_mv if scale == 1.0 else tile_mv.mul_(scale)


def _slope_of_cap(tile_mv: Tensor, scale: float, soft_cap: float | None) -> Tensor | None:
    """Return the derivative of the soft cap, 1 - tanh^2, from capped and scaled logits."""
    if soft_cap is None:
        return None
    return (tile_mv / (soft_cap * scale)).square_().neg_().add_(1.0)


def _target_columns(targets_m: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the target's column in this chunk and whether it is there, without a device sync."""
    local_m = targets_m - first
    return local_m.clamp(0, width - 1), (local_m >= 0) & (local_m < width)


def _normaliser_(tile_mv: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return logsumexp of each row, and the entropy of its softmax.

    This overwrites the tile: a second one would double the peak memory.
    """
    max_m = tile_mv.amax(1)
    tile_mv.sub_(max_m[:, None])
    mean_m = _unnormalised_mean_(tile_mv) if with_entropy else None
    sum_m = tile_mv.exp_().sum(1)
    log_m = sum_m.log()
    return log_m + max_m, None if mean_m is None else log_m - mean_m / sum_m


def _unnormalised_mean_(shifted_mv: Tensor) -> Tensor:
    """Return sum_v exp(x) x over each row, for x <= 0."""
    shifted_mv.clamp_(min=_LOG_ZERO)
    return torch.cat([part.exp().mul_(part).sum(1) for part in _quarters(shifted_mv)])


def _whole_entropy(entropy_MC: Tensor, lse_MC: Tensor, lse_M: Tensor) -> Tensor:
    """Combine the entropies of the chunks by the chain rule.

    It is the entropy of the choice of a chunk, plus the chunks' own entropies weighted by their
    share.
    """
    log_share_MC = lse_MC - lse_M[:, None]
    return (log_share_MC.exp() * (entropy_MC - log_share_MC)).sum(1)


def _weigh_(log_p_mv: Tensor, grad_m: Tensor, entropy_grad_m: Tensor, entropy_m: Tensor) -> None:
    """Replace log p by p * (grad + entropy_grad * (log p + entropy))."""
    log_p_mv.clamp_(min=_LOG_ZERO)
    shift_m = torch.addcmul(grad_m, entropy_grad_m, entropy_m)
    factors = zip(_quarters(log_p_mv), _quarters(entropy_grad_m), _quarters(shift_m), strict=True)
    for part_mv, slope_m, offset_m in factors:
        p_mv = part_mv.exp()
        part_mv.mul_(slope_m[:, None]).add_(offset_m[:, None]).mul_(p_mv)


def _quarters(tile: Tensor) -> tuple[Tensor, ...]:
    """Split a tile into up to four parts: the budget ignores a temporary of a part's size."""
    return tile.split(max(1, -(-tile.shape[0] // 4)))
