"""What running out of memory looks like, on every device."""

from __future__ import annotations

import torch

# All that torch says of it on a CPU, in a plain RuntimeError.
_CPU_ALLOCATOR_FAILED = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR_FAILED in str(error)
