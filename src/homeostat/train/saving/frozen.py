"""Weights that are not trained (under an adapter, of a reference model): a checkpoint does not
contain them, but only checksums that identify them.

A sum of integers is exact in any order, so the checksum is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from homeostat.errors import CheckpointError

_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
# Elements of a tensor that are processed at a time, so that a pass over all weights needs only a
# few megabytes even for a large model.
CHUNK_ELEMENTS = 2**20


# Before the name of a parameter of the reference model, and of the model that computes features.
# Names of the policy's parameters have no prefix.
REFERENCE = "reference:"
FEATURES = "features:"


def checksums(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameter name -> the sum of its bits, taken as integers. Those of its parts add up to it."""
    return {name: _sum_of_bits(param.detach()) for name, param in named}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers. It is computed in chunks, because torch sums a
    copy of its input in the dtype of the result, 8 bytes per element."""
    bits = tensor.reshape(-1).contiguous().view(_INTEGERS[tensor.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(CHUNK_ELEMENTS)]).sum()


def require_same_frozen(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if an adapter would continue over another base model, or a policy
    beside another reference."""
    other = own.keys() ^ stored.keys()
    other |= {name for name in own.keys() & stored.keys() if int(own[name]) != int(stored[name])}
    if not other:
        return
    what = (
        "the adapter in the checkpoint was trained on a base model with other weights than those "
        "of model.path"
    )
    if min(other).startswith(REFERENCE):
        what = (
            "the policy in the checkpoint was trained with another reference than the current "
            "one (reference, or else the policy of model.path and lora.path)"
        )
    if min(other).startswith(FEATURES):
        what = (
            "the features for the policy in the checkpoint came from another model than the "
            "current one (the policy of model.path and lora.path)"
        )
    raise CheckpointError(
        f"{what}: {len(other)} tensors differ, {min(other)!r} first. Restore the model's "
        "files, or start a new run with another `name`."
    )


def not_trained(
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    trained: Collection[str],
    computed: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Checksums of this rank's part of the weights under an adapter."""
    return checksums((name, computed(p)) for name, p in named() if name not in trained)
