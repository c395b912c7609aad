"""Choose a token's experts from the router's logits, and weigh them.

    logits_NE -> scores_NE (softmax or sigmoid, fp32) -> the K best -> their weights

Invariants: everything is fp32 and belongs to one token alone, so a token's choice does not depend
on others; of equal scores the expert with the lower number is better, on every device.

Suffixes: `_N` tokens, `_E` experts, `_K` slots (best first), `_G` groups of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops import kernels
from homeostat.ops.linear import Numerics, linear, tiled_product
from homeostat.ops.moe_shape import MoeShape


def router_logits(x_ND: Tensor, weight_ED: Tensor, *, numerics: Numerics) -> Tensor:
    """Return fp32 [N, E]: x @ weight.T, computed in fp32 whatever they are stored in."""
    if kernels.fused(x_ND) and x_ND.dtype == weight_ED.dtype == torch.bfloat16:
        return _HalfLogits.apply(x_ND, weight_ED, numerics)
    return linear(x_ND.float(), weight_ED.float(), numerics=numerics)


class _HalfLogits(torch.autograd.Function):
    """Logits by the tensor cores: products of bf16 numbers are exact in fp32, and so are the sums'
    dtype and the result. The fp32 gradient is two bf16 terms, which hold 16 of its 24 bits."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor, numerics: Numerics) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        if numerics == "invariant":
            return tiled_product(x_ND, weight_ED, out_dtype=torch.float32)
        return _wide_product(x_ND, weight_ED.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED = ctx.saved_tensors
        high_NE = grads[0].to(x_ND.dtype)
        both_NF = torch.cat([high_NE, (grads[0] - high_NE).to(x_ND.dtype)], dim=1)
        dx_ND = both_NF @ torch.cat([weight_ED, weight_ED])
        high_ED, low_ED = _wide_product(both_NF.t(), x_ND).chunk(2)
        return dx_ND, (high_ED + low_ED).to(weight_ED.dtype), None


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32."""
    if a.is_meta:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def scores_of(logits_NE: Tensor, shape: MoeShape, *, numerics: Numerics = "fast") -> Tensor:
    """Return fp32 [N, E]: how much each token wants each expert."""
    assert logits_NE.dtype == torch.float32, "routers compute in fp32"
    if shape.scoring == "softmax":
        # Row by row, on every device: no row's bits depend on others.
        return logits_NE.softmax(dim=-1)
    return logits_NE.sigmoid() if numerics == "fast" else _InvariantSigmoid.apply(logits_NE)


@torch.no_grad()
def best_experts(scores_NE: Tensor, bias_E: Tensor | None, shape: MoeShape) -> Tensor:
    """Return int64 [N, K]: the best experts of each token, best first, ties by number."""
    if kernels.fused(scores_NE):
        from homeostat.ops.kernels import choice

        return choice.best_experts(scores_NE, bias_E, shape)
    wanted_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if shape.num_groups > 1:
        wanted_NE = _in_best_groups(wanted_NE, shape)
    return _ranked(wanted_NE)[:, : shape.top_k]


def expert_weights(scores_NE: Tensor, ids_NK: Tensor, shape: MoeShape) -> Tensor:
    """Return fp32 [N, K]: the weight of each chosen expert's output. Differentiable."""
    if kernels.fused(scores_NE):
        from homeostat.ops.kernels.choice import ExpertWeights

        return ExpertWeights.apply(scores_NE, ids_NK, shape)
    weights_NK = scores_NE.gather(1, ids_NK)
    if shape.normalised:
        total_N1 = _sum_of_slots(weights_NK)
        # The families differ here: a sum of sigmoids can be 0, one of softmax values cannot.
        weights_NK = weights_NK / (total_N1 + 1e-20 if shape.scoring == "sigmoid" else total_N1)
    return weights_NK if shape.scaling == 1.0 else weights_NK * shape.scaling


def _sum_of_slots(weights_NK: Tensor) -> Tensor:
    """Return [N, 1], added up in slot order: torch.sum would leave its order to the library."""
    total_N1 = weights_NK[:, :1]
    for slot in range(1, weights_NK.shape[1]):
        total_N1 = total_N1 + weights_NK[:, slot : slot + 1]
    return total_N1


class _InvariantSigmoid(torch.autograd.Function):
    """A sigmoid whose bits do not depend on an entry's position: see ops/activations.py.

    The gradient is torch's own: the formula gives inf * 0 for large negative inputs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_ones(()) / x.neg().exp_().add_(1.0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.ops.aten.sigmoid_backward(grads[0], *ctx.saved_tensors)


def _ranked(wanted_NE: Tensor) -> Tensor:
    """Return the experts by their score. topk leaves the order of equal scores open."""
    return wanted_NE.sort(dim=-1, descending=True, stable=True).indices


def _in_best_groups(wanted_NE: Tensor, shape: MoeShape) -> Tensor:
    """Rule out all experts but those of the best groups. A group's score: its two best experts."""
    grouped_NGe = wanted_NE.unflatten(1, (shape.num_groups, -1))
    best_two_NG2 = grouped_NGe.sort(dim=-1, descending=True, stable=True).values[..., :2]
    kept_NG = _ranked(best_two_NG2.sum(dim=-1))[:, : shape.num_groups_kept]
    is_kept_NG = torch.zeros_like(grouped_NGe[..., 0], dtype=torch.bool).scatter_(1, kept_NG, True)
    return grouped_NGe.masked_fill(~is_kept_NG[..., None], -torch.inf).flatten(1)
