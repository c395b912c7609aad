"""Place weights that are multiplied by the same inputs next to each other in memory.

The parameters stay as they are: separate, under their own names, at fixed addresses. But one matrix
product can cover all of them (`joined`), which for few rows costs hardly more than the largest of
them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from homeostat.models.decoder import Decoder, MoeBlock


@torch.no_grad()
def lay_side_by_side(decoder: Decoder) -> None:
    """Move the parameters next to each other; call it before anything keeps their addresses."""
    for layer in decoder.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        neighbours = [(attention.q_proj, attention.k_proj, attention.v_proj)]
        # The experts of a layer are one tensor anyway; a shared one is an ordinary MLP.
        dense = mlp.shared_experts if isinstance(mlp, MoeBlock) else mlp
        if dense is not None:
            neighbours.append((dense.gate_proj, dense.up_proj))
        for maps in neighbours:
            _lay([linear.weight for linear in maps])
            if all(linear.bias is not None for linear in maps):
                _lay([linear.bias for linear in maps])


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one view over all of them along the first dimension; None if they are apart."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    if end > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return None
    size = sum(tensor.shape[0] for tensor in tensors)
    shape = (size, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _lay(parameters: Sequence[nn.Parameter]) -> None:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    sizes = [parameter.shape[0] for parameter in parameters]
    for parameter, part in zip(parameters, whole.split(sizes), strict=True):
        parameter.data = part
