"""Measure the peak memory of real code on tensors without data.

On the meta device every operation makes tensors that have a shape but no memory. Counting the
storages that are alive gives what the same code would hold on a real device, for any architecture,
because the code that is measured is the code that runs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The CUDA allocator rounds every block up to this size.
_ROUND = 512


class LiveBytes(TorchDispatchMode):
    """Count the allocations of operations inside the block. `peak` is over its lifetime."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.device_type = device_type
        self.now = 0
        self.peak = 0
        self._alive: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = self._storages(result)
        if made.keys() - self._alive.keys():
            # A view is no allocation, even of a tensor from before the count began.
            given = self._storages((args, kwargs))
            for key in made.keys() - self._alive.keys() - given.keys():
                self._note(key, made[key])
        return result

    def _storages(self, tree: Any) -> dict[int, torch.UntypedStorage]:
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        storages = (x.untyped_storage() for x in tensors if x.device.type == self.device_type)
        return {storage._cdata: storage for storage in storages}

    def _note(self, key: int, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // _ROUND) * _ROUND
        self._alive[key] = (size, weakref.ref(storage, lambda _: self._forget(key)))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        size, _ = self._alive.pop(key)
        self.now -= size
