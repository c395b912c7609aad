"""Recompute activations in the backward pass instead of keeping them.

    with forgotten(value, again):    what is computed of `value` inside keeps no reference to it
        ...                          for its gradient, but calls `again` when that is due

Invariant: `again` produces the same bits, so gradients have the same bits. This is worth it for
activations that are cheap to compute and large to keep: norms and gates, of which a decoder layer
keeps three, a third of everything it keeps. Their inputs are kept in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_NOTHING = nullcontext()


def forgotten(
    value: Tensor, again: Callable[[], Tensor], *, enabled: bool
) -> AbstractContextManager[Any]:
    """Let operations inside the block recompute `value` by `again` instead of keeping it."""
    if not enabled or not torch.is_grad_enabled():
        return _NOTHING
    memo = _Memo(value, again)
    return saved_tensors_hooks(memo.pack, memo.unpack)


class _Memo:
    """Compute the value for its first user, and release it after the last."""

    def __init__(self, value: Tensor, again: Callable[[], Tensor]) -> None:
        self._place = _place(value)
        self._again = again
        self._num_users = 0
        self._made: Tensor | None = None

    def pack(self, kept: Tensor) -> Tensor | _Memo:
        if _place(kept) != self._place:
            return kept
        self._num_users += 1
        return self

    def unpack(self, packed: Tensor | _Memo) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._made is None:
            with torch.no_grad():
                self._made = self._again()
        made = self._made
        self._num_users -= 1
        if self._num_users <= 0:
            self._made = None
        return made


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Identify the memory of a tensor; autograd keeps another object over the same memory."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride()
