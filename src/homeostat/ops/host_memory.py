"""Host memory that a GPU copies from and to without blocking the host."""

from __future__ import annotations

import torch
from torch import Tensor

HOST = torch.device("cpu")
# Places in a block, or in a buffer on the device, begin at multiples of this.
_ALIGNMENT = 512


def aligned(size: int) -> int:
    """Return the number of bytes that a tensor of `size` bytes takes in a block."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class HostMemory:
    """Host memory for many tensors, in pinned blocks: torch rounds each up to a power of two."""

    def __init__(self, *, pinned: bool, block_bytes: int = 2**28) -> None:
        self._pinned = pinned
        self._block_bytes = block_bytes
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in this memory."""
        if not self._pinned:
            return tensor.to(HOST)
        size = aligned(tensor.nbytes)
        if self._used + size > len(self._block):
            length = max(self._block_bytes, 1 << (size - 1).bit_length())
            self._block = torch.empty(length, dtype=torch.uint8, pin_memory=True)
            self._used = 0
        bytes_here = self._block[self._used : self._used + tensor.nbytes]
        self._used += size
        return bytes_here.view(tensor.dtype).view(tensor.shape).copy_(tensor)
