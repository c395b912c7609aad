"""Experts by grouped products: all experts of a layer in one launch, forward and backward.

    sort pairs by expert -> rows -> gate and up -> silu * up -> down -> weighted sum over slots

The host never waits for the device, although only the device knows how many rows an expert has. For
the backward pass gate and up are kept, and the tokens; the rows of all pairs (K times as large) are
laid out again, the gated ones are recomputed, and the outputs are not needed
(ops/kernels/expert_rows.py). So `gradient_checkpointing: selective` has nothing more to save here.

In `invariant` numerics the forward products go through ops/kernels/grouped.py; those of the
gradients are a library's in both numerics.

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_E` experts, `_I` width of an expert, `_J` twice
that: gate, then up; `_S` all (token, slot) pairs by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops import kernels
from homeostat.ops.expert_rows import gated, gated_gradients, gathered, spread
from homeostat.ops.linear import Numerics, tiled_product
from homeostat.ops.pairs import Pairs, pairs_of


def grouped_experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    *,
    numerics: Numerics,
) -> Tensor:
    """Return [N, D]: the weighted sum of what each token's experts make of it."""
    return _GroupedExperts.apply(x_ND, ids_NK, weights_NK, gate_up_EJD, down_EDI, numerics)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EJD: Tensor,
        down_EDI: Tensor,
        numerics: Numerics,
    ) -> Tensor:
        pairs, num_slots = pairs_of(ids_NK, len(down_EDI), like=x_ND), ids_NK.shape[1]
        products = _PRODUCTS[numerics, kernels.fused(x_ND)]
        both_SJ, out_SD = products(x_ND, gate_up_EJD, down_EDI, pairs, num_slots)
        places = pairs.order_S, pairs.place_S, pairs.ends_E
        ctx.save_for_backward(x_ND, weights_NK, both_SJ, gate_up_EJD, down_EDI, *places)
        return gathered(out_SD, pairs, weights_NK, num_slots=num_slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_ND, weights_NK, both_SJ, gate_up_EJD, down_EDI, *places = ctx.saved_tensors
        needs_x, _, needs_weights, needs_gate_up, needs_down, _ = ctx.needs_input_grad
        pairs, num_slots = Pairs(*places), weights_NK.shape[1]
        dx_ND = dgate_up_EJD = ddown_EDI = None
        dout_SD = spread(grads[0], pairs, num_slots=num_slots)
        back_SI = grouped_mm(dout_SD, down_EDI, pairs.ends_E)
        dboth_SJ, dweights_NK, scaled_SI = gated_gradients(back_SI, both_SJ, pairs, weights_NK)
        del back_SI
        if needs_down:
            ddown_EDI = grouped_mm(dout_SD.t(), scaled_SI, pairs.ends_E)
        del dout_SD, scaled_SI
        if needs_gate_up:
            rows_SD = spread(x_ND, pairs, num_slots=num_slots)
            dgate_up_EJD = grouped_mm(dboth_SJ.t(), rows_SD, pairs.ends_E)
            del rows_SD
        if needs_x:
            drows_SD = grouped_mm(dboth_SJ, gate_up_EJD, pairs.ends_E)
            dx_ND = gathered(drows_SD, pairs, None, num_slots=num_slots)
        return dx_ND, None, dweights_NK if needs_weights else None, dgate_up_EJD, ddown_EDI, None


def _by_library(
    x_ND: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, pairs: Pairs, num_slots: int
) -> tuple[Tensor, Tensor]:
    """Return gate and up [S, J], and the experts' outputs [S, D]."""
    rows_SD = spread(x_ND, pairs, num_slots=num_slots)
    both_SJ = grouped_mm(rows_SD, gate_up_EJD.transpose(1, 2), pairs.ends_E)
    del rows_SD
    return both_SJ, grouped_mm(gated(both_SJ), down_EDI.transpose(1, 2), pairs.ends_E)


def by_tiles(
    x_ND: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, pairs: Pairs, num_slots: int
) -> tuple[Tensor, Tensor]:
    """The same by kernels whose results do not depend on which rows there are."""
    from homeostat.ops.kernels.grouped import cut_of, grouped_product

    cut = cut_of(pairs, like=x_ND)
    both_SJ = grouped_product(x_ND.contiguous(), gate_up_EJD, pairs, cut, num_slots=num_slots)
    return both_SJ, grouped_product(gated(both_SJ), down_EDI, pairs, cut)


def _by_expert(
    x_ND: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, pairs: Pairs, num_slots: int
) -> tuple[Tensor, Tensor]:
    """The same on a CPU in invariant numerics, one expert after the other."""

    def product(rows_SK: Tensor, weight_EOK: Tensor) -> Tensor:
        parts = zip(_parts(rows_SK, pairs.ends_E), weight_EOK, strict=True)
        # Their own memory, so that tiles are aligned whatever rows come before them.
        return torch.cat([tiled_product(part.clone(), weight) for part, weight in parts])

    both_SJ = product(spread(x_ND, pairs, num_slots=num_slots), gate_up_EJD)
    return both_SJ, product(gated(both_SJ, numerics="invariant"), down_EDI)


# By numerics, and by whether there are kernels.
_PRODUCTS = {
    ("fast", True): _by_library,
    ("fast", False): _by_library,
    ("invariant", True): by_tiles,
    ("invariant", False): _by_expert,
}


def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return the products of each expert's rows, all of one kind of shape:

    [S, K] by [E, K, O] gives [S, O]; [K, S] by [S, O] gives [E, K, O], zeros for an expert that has
    no rows.
    """
    if _is_grouped(a) and _is_grouped(b):
        return torch._grouped_mm(a, b, offs=ends_E)
    if b.ndim == 3:
        return torch.cat([part @ one for part, one in zip(_parts(a, ends_E), b, strict=True)])
    pairs = zip(_parts(a.t(), ends_E), _parts(b, ends_E), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _is_grouped(x: Tensor) -> bool:
    """Return whether torch's grouped product takes the tensor: bf16, rows at multiples of 16 B."""
    strides = sorted(x.stride())
    is_aligned = all(stride * x.itemsize % 16 == 0 for stride in strides[1:])
    return x.dtype == torch.bfloat16 and strides[0] == 1 and is_aligned and x.data_ptr() % 16 == 0


def _parts(rows_S: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """Split rows by expert. This waits for the device."""
    if ends_E.is_meta:
        return rows_S.tensor_split(len(ends_E))
    return rows_S.tensor_split(ends_E[:-1].long().cpu())
