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

from typing import Protocol

import torch
from torch import Tensor

from homeostat.config.moe import GroupedKernel
from homeostat.ops import kernels
from homeostat.ops.activations import gated_silu
from homeostat.ops.expert_rows import combined
from homeostat.ops.grouped_experts import grouped_experts
from homeostat.ops.linear import Numerics, linear


class ExpertsProduct(Protocol):
    """Computes the weighted sum of the outputs of each token's experts, differentiably."""

    def __call__(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EJD: Tensor,
        down_EDI: Tensor,
        *,
        numerics: Numerics,
        kernel: GroupedKernel,
    ) -> Tensor: ...


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
    if is_grouped(x_ND, kernel=kernel, numerics=numerics):
        return grouped_experts(*tensors, numerics=numerics)
    return _plain_experts(*tensors, numerics=numerics)


def is_grouped(x_ND: Tensor, *, kernel: GroupedKernel, numerics: Numerics) -> bool:
    """Return whether to use grouped products. auto: on a GPU, where there are kernels for them."""
    if kernel != "auto":
        return kernel == "grouped"
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


def _counts(ids_NK: Tensor, *, num_experts: int) -> list[int]:
    if ids_NK.is_meta:
        # Memory is estimated without values: an even load.
        least, more = divmod(ids_NK.numel(), num_experts)
        return [least + (expert < more) for expert in range(num_experts)]
    return torch.bincount(ids_NK.flatten(), minlength=num_experts).tolist()
