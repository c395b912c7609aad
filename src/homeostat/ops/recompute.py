"""Activations that the backward pass makes again instead of keeping them.

    with forgotten(value, again):    what is computed of `value` inside keeps no reference to it
        ...                          for its gradient, but calls `again` when that is due

Invariant: `again` makes the same bits, so that gradients are the same bits. It pays for what is
cheap to make and large to keep: norms and gates, of which a decoder layer keeps three, a third of
all that it keeps. What it is made of is kept in any case.
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
    if not enabled or not torch.is_grad_enabled():
        return _NOTHING
    memo = _Memo(value, again)
    return saved_tensors_hooks(memo.pack, memo.unpack)


class _Memo:
    """Makes the value for the first that asks, and lets go of it after the last."""

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
    """Which memory it is; autograd keeps another object over the same."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride()
