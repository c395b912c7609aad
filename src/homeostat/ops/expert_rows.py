"""Passes over the rows of all (token, slot) pairs of a layer with experts; they lie by expert.

On a GPU each is one launch (ops/kernels/expert_rows.py, which has the formulas); the code here is
its reference.

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_S` pairs by expert, `_I` width of an expert,
`_J` twice that: gate, then up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.ops import kernels
from homeostat.ops.activations import gated_silu
from homeostat.ops.linear import Numerics
from homeostat.ops.pairs import Pairs


def spread(x_ND: Tensor, pairs: Pairs, *, num_slots: int) -> Tensor:
    """Return [S, D]: the row of each pair's token."""
    if kernels.fused(x_ND):
        from homeostat.ops.kernels import expert_rows

        return expert_rows.spread(x_ND, pairs.place_S, num_slots=num_slots)
    return x_ND[pairs.order_S // num_slots]


def gated(both_SJ: Tensor, *, numerics: Numerics = "fast") -> Tensor:
    """Return [S, I]: silu(gate) * up."""
    if kernels.fused(both_SJ):
        from homeostat.ops.kernels import expert_rows

        return expert_rows.gated(both_SJ)
    return gated_silu(*both_SJ.chunk(2, dim=1), numerics=numerics)


def gated_gradients(
    back_SI: Tensor, both_SJ: Tensor, pairs: Pairs, weights_NK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ops/kernels/expert_rows.py's function of this name does."""
    if kernels.fused(back_SI):
        from homeostat.ops.kernels import expert_rows

        return expert_rows.gated_gradients(back_SI, both_SJ, pairs.order_S, weights_NK)
    gate_SI, up_SI = both_SJ.float().chunk(2, dim=1)
    weight_S1 = weights_NK.flatten()[pairs.order_S, None]
    gated_SI = gated(both_SJ).float()
    dweights_NK = (back_SI * gated_SI).sum(1)[pairs.place_S].view_as(weights_NK)
    share_SI = gate_SI.sigmoid()
    silu_SI, grad_SI = gate_SI * share_SI, back_SI * weight_S1
    dgate_SI = grad_SI * up_SI * (share_SI + silu_SI * (1 - share_SI))
    dboth_SJ = torch.cat([dgate_SI, grad_SI * silu_SI], dim=1)
    return dboth_SJ.to(both_SJ.dtype), dweights_NK, (gated_SI * weight_S1).to(both_SJ.dtype)


def gathered(rows_SD: Tensor, pairs: Pairs, weights_NK: Tensor | None, *, num_slots: int) -> Tensor:
    """Return [N, D]: the weighted sum over slots, in slot order, in fp32, rounded once."""
    if kernels.fused(rows_SD):
        from homeostat.ops.kernels import expert_rows

        return expert_rows.gathered(rows_SD, pairs.place_S, weights_NK, num_slots=num_slots)
    out_NKD = rows_SD[pairs.place_S].unflatten(0, (-1, num_slots))
    if weights_NK is None:
        weights_NK = torch.ones_like(out_NKD[..., 0], dtype=torch.float32)
    return combined(out_NKD, weights_NK)


def combined(out_NKD: Tensor, weights_NK: Tensor) -> Tensor:
    """Return [N, D]: the weighted sum over slots, in slot order, in fp32, rounded once."""
    # Slot by slot: a sum over the dimension would leave its order to the library.
    total_ND = out_NKD[:, 0].float() * weights_NK[:, :1]
    for slot in range(1, out_NKD.shape[1]):
        total_ND = total_ND + out_NKD[:, slot].float() * weights_NK[:, slot : slot + 1]
    return total_ND.to(out_NKD.dtype)
