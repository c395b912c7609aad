"""The outputs of a token's experts, weighted and added up.

    x_ND -> rows of each expert side by side -> gate and up, silu, down -> sum over a token's slots

    plain     one product per expert that any token chose: the reference
    grouped   all experts in one launch, and nothing waits for the device (ops/grouped_experts.py)

Both sum in slot order. Every (token, slot) is computed by itself, so with
`numerics="invariant"` a token's result has the same bits whatever else is in the pass.

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_E` experts, `_I` width of an expert, `_S` all
(token, slot) pairs by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.config.moe import GroupedKernel
from homeostat.ops import kernels
from homeostat.ops.activations import gated_silu
from homeostat.ops.expert_rows import combined
from homeostat.ops.grouped_experts import grouped_experts
from homeostat.ops.linear import Numerics, linear


def experts_of(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    *,
    numerics: Numerics = "fast",
    kernel: GroupedKernel = "auto",
) -> Tensor:
    """Return [N, D]: the weighted sum of what each token's experts make of it."""
    tensors = x_ND, ids_NK, weights_NK, gate_up_EJD, down_EDI
    if kernel == "grouped" or (kernel == "auto" and _should_group(x_ND, numerics)):
        return grouped_experts(*tensors, numerics=numerics)
    return _plain_experts(*tensors, numerics=numerics)


def _should_group(x_ND: Tensor, numerics: Numerics) -> bool:
    """Return whether grouped products are the better choice: on a GPU, where there are kernels."""
    is_fast = x_ND.dtype == torch.bfloat16 or numerics == "invariant"
    return is_fast and kernels.on_cuda(x_ND) and kernels.fused(x_ND)


def _plain_experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    *,
    numerics: Numerics,
) -> Tensor:
    num_tokens, num_slots = ids_NK.shape
    order_S = ids_NK.flatten().argsort(stable=True)
    counts = _counts(ids_NK, len(down_EDI))
    rows_SD = x_ND[order_S // num_slots]
    outs = []
    for expert, rows_mD in enumerate(rows_SD.split(counts)):
        if counts[expert]:
            gate_mI, up_mI = linear(rows_mD, gate_up_EJD[expert], numerics=numerics).chunk(2, 1)
            gated_mI = gated_silu(gate_mI, up_mI, numerics=numerics)
            outs.append(linear(gated_mI, down_EDI[expert], numerics=numerics))
    # Back to the order of (token, slot) pairs.
    out_NKD = torch.cat(outs)[order_S.argsort()].view(num_tokens, num_slots, -1)
    return combined(out_NKD, weights_NK)


def _counts(ids_NK: Tensor, num_experts: int) -> list[int]:
    """Return how many pairs go to each expert. Where only shapes are computed, as many to each."""
    if ids_NK.is_meta:
        return [len(part) for part in ids_NK.flatten().tensor_split(num_experts)]
    return torch.bincount(ids_NK.flatten(), minlength=num_experts).tolist()
