"""Weights under an adapter: a checkpoint does not hold them, so it holds what tells them apart.

A sum of integers is exact in any order, so that it is the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from homeostat.errors import CheckpointError

_INTEGERS = {4: torch.int32, 2: torch.int16}


def frozen_checksums(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name -> the sum of its bits, taken as integers; none where all are trained."""
    frozen = ((name, p.detach()) for name, p in model.named_parameters() if not p.requires_grad)
    return {name: _bits(param).sum(dtype=torch.int64) for name, param in frozen}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def require_same_frozen(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where an adapter would go on over another base model."""
    other = own.keys() ^ stored.keys()
    other |= {name for name in own.keys() & stored.keys() if int(own[name]) != int(stored[name])}
    if other:
        raise CheckpointError(
            f"the adapter in the checkpoint was trained over other weights than those of "
            f"model.path: {len(other)} tensors differ, {min(other)!r} first. Restore the model's "
            "files, or start a new run with another `name`."
        )
