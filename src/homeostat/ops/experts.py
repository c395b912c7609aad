"""The outputs of a token's experts, weighted and added up.

    x_ND -> rows of each expert side by side -> gate and up, silu, down -> sum over a token's slots

This is the plain path, the reference for the grouped kernels: one product per expert that any
token chose, and sums in slot order. Every (token, slot) is computed by itself, so with
`numerics="invariant"` a token's result has the same bits whatever else is in the pass.

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_E` experts, `_I` width of an expert, `_S` all
(token, slot) pairs by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.ops.activations import gated_silu
from homeostat.ops.linear import Numerics, linear


def experts_of(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    *,
    numerics: Numerics = "fast",
) -> Tensor:
    """Return [N, D]: the weighted sum of what each token's experts make of it."""
    num_tokens, num_slots = ids_NK.shape
    order_S = ids_NK.flatten().argsort(stable=True)
    counts = _counts(ids_NK, num_experts=len(down_EDI))
    rows_SD = x_ND[order_S // num_slots]
    outs = []
    for expert, rows_mD in enumerate(rows_SD.split(counts)):
        if counts[expert]:
            if numerics == "invariant":
                # Its own memory, so that its tiles are aligned whatever rows come before them.
                rows_mD = rows_mD.clone()
            gate_mI, up_mI = linear(rows_mD, gate_up_EJD[expert], numerics=numerics).chunk(2, 1)
            gated_mI = gated_silu(gate_mI, up_mI, numerics=numerics)
            outs.append(linear(gated_mI, down_EDI[expert], numerics=numerics))
    # Back to the order of (token, slot) pairs.
    out_NKD = torch.cat(outs)[order_S.argsort()].view(num_tokens, num_slots, -1)
    return combined(out_NKD, weights_NK)


def combined(out_NKD: Tensor, weights_NK: Tensor) -> Tensor:
    """Return [N, D]: the weighted sum over slots, in slot order, in fp32, rounded once."""
    # Slot by slot: a sum over the dimension would leave its order to the library.
    total_ND = out_NKD[:, 0].float() * weights_NK[:, :1]
    for slot in range(1, out_NKD.shape[1]):
        total_ND = total_ND + out_NKD[:, slot].float() * weights_NK[:, slot : slot + 1]
    return total_ND.to(out_NKD.dtype)


def _counts(ids_NK: Tensor, *, num_experts: int) -> list[int]:
    if ids_NK.is_meta:
        # Memory is estimated without values: an even load.
        least, more = divmod(ids_NK.numel(), num_experts)
        return [least + (expert < more) for expert in range(num_experts)]
    return torch.bincount(ids_NK.flatten(), minlength=num_experts).tolist()
