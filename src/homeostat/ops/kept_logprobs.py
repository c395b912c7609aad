"""Token log-probs over kept sets: the distribution that top-k, top-p or min-p left to sample from.

    logp[c] = z[c, target[c]] - logsumexp over k in kept[c] of z[c, k]

Only the rows of the output weight that some token kept are read, so the product over the
vocabulary is never made: a set has at most 1,024 ids. Invariants: gradients reach nothing but kept
logits; the bits of a token's log-prob depend on its hidden state and its set alone, whatever is
computed beside it, so that an engine that calls this has the trainer's bits.

    z[p] = hidden[row[p]] . weight[id[p]]           p: a pair of a token and an id of its set
    out[b] = sum over p in bag b of c[p] table[index[p]]

The second line serves both gradients: bags are tokens and the table is the weight, or bags are
words of the vocabulary and the table is the hidden states. On CUDA both are kernels
(ops/kernels/kept.py); the code here is their reference.

Suffixes: `_M` predicted tokens, `_C` those with a kept set, `_P` pairs of a token and an id it
kept, `_V` vocabulary, `_D` model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from homeostat.ops import kernels
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.logit_tiles import Entropy, capped_logits

# Pairs that are multiplied at a time. A constant shape, so that bits do not depend on the number.
_TILE = 256


def kept_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    kept: KeptSets,
    *,
    scale: float,
    entropy: Entropy,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return fp32 [C] log-probs and, where asked for, entropies of the tokens with kept sets."""
    return _KeptLogprobs.apply(hidden_CD, weight_VD, targets_C, kept, scale, entropy, soft_cap)


class _KeptLogprobs(torch.autograd.Function):
    """Keep the logits of the pairs; the backward pass is two weighted sums of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CD: Tensor,
        weight_VD: Tensor,
        targets_C: Tensor,
        kept: KeptSets,
        scale: float,
        entropy: Entropy,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        hidden_CD = hidden_CD.to(weight_VD.dtype)
        # The kernel has no soft cap.
        if kernels.fused(hidden_CD) and soft_cap is None:
            from homeostat.ops.kernels.kept import kept_sums

            starts_C, ends_C = kept.offsets_C[:-1], kept.offsets_C[1:]
            scale_C = hidden_CD.new_full((len(targets_C),), scale, dtype=torch.float32)
            sums = kept_sums(hidden_CD, weight_VD, targets_C, kept.ids_P, starts_C, ends_C, scale_C)
            z_P, target_C, lse_C, entropy_C = sums
        else:
            z_P = _pair_products(hidden_CD, weight_VD, kept.row_P, kept.ids_P)
            if soft_cap is not None:
                z_P = capped_logits(z_P, soft_cap, numerics="invariant")
            z_P.mul_(scale)
            target_C, lse_C, entropy_C = _sums(z_P, kept, targets_C)
        ctx.scale, ctx.kept, ctx.soft_cap = scale, kept, soft_cap
        ctx.has_entropy_grad = entropy is Entropy.GRAD
        if entropy is Entropy.VALUE:
            ctx.mark_non_differentiable(entropy_C)
        ctx.save_for_backward(hidden_CD, weight_VD, targets_C, z_P, lse_C, entropy_C)
        return target_C - lse_C, None if entropy is Entropy.NONE else entropy_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden_CD, weight_VD, targets_C, z_P, lse_C, entropy_C = ctx.saved_tensors
        kept, (grad_C, entropy_grad_C) = ctx.kept, grads
        row_P = kept.row_P
        log_p_P = z_P - lse_C[row_P]
        p_P = log_p_P.exp()
        is_target_P = (kept.ids_P == targets_C[row_P]).float()
        slope_P = (is_target_P - p_P) * grad_C[row_P]
        if ctx.has_entropy_grad:
            slope_P -= entropy_grad_C[row_P] * p_P * (log_p_P + entropy_C[row_P])
        slope_P *= ctx.scale
        if ctx.soft_cap is not None:
            slope_P *= 1.0 - (z_P / (ctx.scale * ctx.soft_cap)).square()
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = _bag_sums(weight_VD, kept.ids_P, kept.offsets_C, slope_P)
        if ctx.needs_input_grad[1]:
            # Stable: the order of the sums, and so their bits, is that of the tokens.
            sorted_P, order_P = kept.ids_P.sort(stable=True)
            words_V = torch.arange(weight_VD.shape[0] + 1, device=sorted_P.device)
            offsets_V = torch.searchsorted(sorted_P, words_V.to(sorted_P.dtype))
            dweight = _bag_sums(hidden_CD, row_P[order_P], offsets_V, slope_P[order_P])
        return dhidden, dweight, *[None] * 5


def _pair_products(hidden_CD: Tensor, weight_VD: Tensor, row_P: Tensor, ids_P: Tensor) -> Tensor:
    """Return fp32 [P]. Tiles have one shape, the last one padded."""
    count = len(ids_P)
    row_P, ids_P = (functional.pad(index_P, (0, -count % _TILE)) for index_P in (row_P, ids_P))
    tiles = zip(row_P.split(_TILE), ids_P.split(_TILE), strict=True)
    found = [(hidden_CD[row_p].float() * weight_VD[ids_p].float()).sum(1) for row_p, ids_p in tiles]
    return torch.cat([hidden_CD.new_zeros(0, dtype=torch.float32), *found])[:count]


def _sums(z_P: Tensor, kept: KeptSets, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's logit, logsumexp and entropy of each token, [C].

    On a CPU `index_add_` of single numbers goes one by one, so each sum has one order.
    """
    row_P, num_tokens = kept.row_P, len(targets_C)

    def total(values_P: Tensor) -> Tensor:
        zeros_C = values_P.new_zeros(num_tokens, dtype=torch.float64)
        return zeros_C.index_add_(0, row_P, values_P.double())

    top_C = z_P.new_full((num_tokens,), -torch.inf).scatter_reduce_(0, row_P, z_P, "amax")
    shifted_P = z_P - top_C[row_P]
    weight_P = shifted_P.exp()
    sum_C = total(weight_P)
    log_C = sum_C.log()
    entropy_C = log_C - total(weight_P * shifted_P) / sum_C
    target_C = total(z_P.where(kept.ids_P == targets_C[row_P], 0.0))
    return target_C.float(), (log_C + top_C).float(), entropy_C.float()


def _bag_sums(table_RD: Tensor, index_P: Tensor, offsets_B: Tensor, factor_P: Tensor) -> Tensor:
    """Return [B, D] in the table's dtype: of each bag, the sum of its rows times their factors."""
    if kernels.fused(table_RD):
        from homeostat.ops.kernels.kept import bag_sums

        return bag_sums(table_RD, index_P, offsets_B, factor_P)
    sums_BD = functional.embedding_bag(
        index_P.long(),
        table_RD.float(),
        offsets_B.long(),
        mode="sum",
        per_sample_weights=factor_P,
        include_last_offset=True,
    )
    return sums_BD.to(table_RD.dtype)
