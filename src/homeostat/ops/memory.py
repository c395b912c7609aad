"""What running out of memory looks like, on every device."""

from __future__ import annotations

import torch

from homeostat.observe.exits import says_out_of_memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, in Python, or in torch's CPU allocator, which raises
    a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))
