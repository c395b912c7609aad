"""Recognise out-of-memory errors on every device."""

from __future__ import annotations

import torch

from homeostat.observe.exits import says_out_of_memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: on a GPU, in Python, or in torch's CPU allocator.

    The latter raises a plain RuntimeError.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def reason_of(error: BaseException) -> str:
    """Return the first line of the error's text; its class if it has none, as a MemoryError."""
    return next(iter(str(error).splitlines()), type(error).__name__)
