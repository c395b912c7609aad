"""Gradients of an update, summed exactly over its micro-batches.

If a parameter is fp32, autograd sums on the parameter itself. If it is bf16, each micro-batch's
gradient is added to an fp32 sum as soon as autograd has made it and then freed, so nothing is
summed in bf16. The first micro-batch of an update overwrites the old sum, so nothing has to be
zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor


class GradSum:
    """The fp32 gradient of one parameter, held throughout: an update never waits for memory."""

    def __init__(self, like: Tensor) -> None:
        self._total = torch.zeros_like(like, dtype=torch.float32)
        self._is_begun = False

    @property
    def value(self) -> Tensor | None:
        """Return the sum; None before the first micro-batch of an update."""
        return self._total if self._is_begun else None

    def add(self, grad: Tensor) -> None:
        """Add a micro-batch's gradient."""
        if self._is_begun:
            self._total.add_(grad)
        else:
            self._total.copy_(grad)
            self._is_begun = True

    def clear(self) -> None:
        """Forget the sum, but keep its memory."""
        self._is_begun = False


class Gradients:
    """The gradients of all trained parameters.

    All gradients are added through `add`, whether `backward` computed them or
    `torch.autograd.grad`, which fires no hooks.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._sums: dict[str, GradSum] = {}
        for name, param in params.items():
            if param.dtype != torch.float32:
                self._sums[name] = GradSum(param)
                # The hook holds no reference back to the parameter or to this object: a trainer
                # without references must free its memory at once, not at the next garbage
                # collection.
                param.register_post_accumulate_grad_hook(partial(_take_grad, self._sums[name]))

    def of(self, name: str) -> Tensor | None:
        """Return a parameter's gradient in fp32; None if nothing has reached it."""
        total = self._sums.get(name)
        return self._params[name].grad if total is None else total.value

    def add(self, name: str, grad: Tensor) -> None:
        """Add a micro-batch's gradient."""
        total, param = self._sums.get(name), self._params[name]
        if total is None:
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        else:
            total.add(grad)

    def clear(self) -> None:
        for param in self._params.values():
            param.grad = None
        for total in self._sums.values():
            total.clear()

    def present(self) -> dict[str, Tensor]:
        """Return the gradients that there are, by name."""
        found = {name: self.of(name) for name in self._params}
        return {name: grad for name, grad in found.items() if grad is not None}

    def norm(self) -> Tensor:
        """Norm over all gradients as a device scalar."""
        grads = list(self.present().values())
        assert grads, "no gradient has reached the optimizer"
        return torch.linalg.vector_norm(tensor_norms(grads))

    def scale(self, factor: float) -> None:
        for grads in by_device(list(self.present().values())):
            torch._foreach_mul_(grads, factor)


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the fp32 norm of each tensor, in order, on one device."""
    # By device and tensor, because a list is not computed in one go over several devices.
    found: dict[int, Tensor] = {}
    for group in by_device(tensors):
        is_low = any(tensor.dtype != torch.float32 for tensor in group)
        dtype = torch.float32 if is_low else None
        norms = torch._foreach_norm(group, dtype=dtype)
        found |= dict(zip(map(id, group), norms, strict=True))
    return stacked([found[id(tensor)].float() for tensor in tensors])


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars on one device: on the GPU if one of them is there."""
    devices = dict.fromkeys(scalar.device for scalar in scalars)
    device = next((device for device in devices if device.type != "cpu"), next(iter(devices)))
    return torch.stack([scalar.to(device) for scalar in scalars])


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split a list by device, in order. What is offloaded is in host memory, the rest is not."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


def _take_grad(total: GradSum, param: Tensor) -> None:
    """Move the gradient that `backward` left on a parameter to its sum."""
    assert param.grad is not None
    total.add(param.grad)
    param.grad = None
