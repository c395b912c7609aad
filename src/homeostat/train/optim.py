"""AdamW over fp32 masters, with exact gradient accumulation.

Parameters live in the compute dtype at fixed addresses. Where that is fp32, a parameter is its own
master. Where it is bf16, the optimizer owns an fp32 master and an fp32 gradient: each micro-batch's
bf16 gradient is added to the fp32 one as soon as autograd has made it and then freed, so nothing
is summed in bf16; after a step the masters are written back into the parameters in place. The first
micro-batch of an update overwrites what the fp32 gradient held: nothing has to be zeroed.

However a gradient was computed (by `backward`, or by `torch.autograd.grad`, which fires no hooks),
it reaches its master through `MasterAdamW.add_grad`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from homeostat.config.trainer import AdamWConfig
from homeostat.train.frozen import CHUNK_ELEMENTS

# torch.nn.utils.clip_grad_norm_ adds the same, so that clipped norms agree with other trainers.
CLIP_EPS = 1e-6


class EagerAdamW(torch.optim.AdamW):
    """torch's AdamW without the wrappers that import torch's compiler, which takes seconds.

    They only matter to an optimizer that is compiled. `step` must be called without gradients.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    step = inspect.unwrap(torch.optim.AdamW.step)


class MasterAdamW:
    """The optimizer of one model. Moments are allocated at once: memory is known from the start."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], config: AdamWConfig) -> None:
        self.params = {name: param for name, param in named if param.requires_grad}
        assert self.params, "nothing is trainable"
        self.masters = {name: _master_of(param) for name, param in self.params.items()}
        # Held throughout: an update never waits for memory that another one took.
        self._totals = {
            name: torch.zeros_like(master)
            for name, master in self.masters.items()
            if master is not self.params[name]
        }
        for name, total in self._totals.items():
            # The hook holds no reference back to the parameter or to this object: a trainer that
            # nobody holds must free its memory at once, not at the next garbage collection.
            take = partial(_take_grad, self.masters[name], total)
            self.params[name].register_post_accumulate_grad_hook(take)
        pairs = [(self.params[name], master) for name, master in self.masters.items()]
        self._copied = [(param, master) for param, master in pairs if param is not master]
        matrices = [m for m in self.masters.values() if m.ndim >= 2]
        vectors = [m for m in self.masters.values() if m.ndim < 2]
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in ((matrices, config.decay), (vectors, 0.0))
            if group
        ]
        betas = (config.beta1, config.beta2)
        self.adamw = EagerAdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def zero_grad(self) -> None:
        for name, master in self.masters.items():
            self.params[name].grad = None
            master.grad = None

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Add a micro-batch's gradient to that of the parameter's master, in the master's dtype."""
        master, total = self.masters[name], self._totals.get(name)
        if total is None:
            master.grad = grad if master.grad is None else master.grad.add_(grad)
        else:
            _add_to_master(master, total, grad)

    def grads(self) -> list[Tensor]:
        return [m.grad for m in self.masters.values() if m.grad is not None]

    def grad_norm(self) -> Tensor:
        """Norm over all gradients, before clipping, as a device scalar."""
        assert self.grads(), "no gradient has reached the optimizer"
        return torch.linalg.vector_norm(tensor_norms(self.grads()))

    @torch.no_grad()
    def step(self, *, learning_rate: float, grad_norm: float, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None:
            scale = max_grad_norm / (grad_norm + CLIP_EPS)
            if scale < 1.0:
                for grads in _by_device(self.grads()):
                    torch._foreach_mul_(grads, scale)  # pyright: ignore[reportPrivateImportUsage]
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.write_back()

    def update_norms(self, learning_rate: float) -> Tensor:
        """Norm of what the last step took off each master, weight decay aside, from the moments.

        lr * (m / c1) / (sqrt(v / c2) + eps) = lr sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)) with
        c = 1 - beta^step: all but one sum and one quotient is done for all tensors at once.
        """
        (beta1, beta2), eps = (self.adamw.param_groups[0][name] for name in ("betas", "eps"))
        states = [self.adamw.state[master] for master in self.masters.values()]
        # A tensor that never had a gradient has moments of 0, and no step to correct for.
        count = stacked([state["step"] for state in states]).clamp_min(1)
        root = (1 - beta2**count).sqrt()
        norms = [
            _norm_of_quotient(state["exp_avg"], state["exp_avg_sq"], small)
            for state, small in zip(states, (eps * root).unbind(), strict=True)
        ]
        return stacked(norms) * (learning_rate * root / (1 - beta1**count))

    def write_back(self) -> None:
        """Copy the masters into the parameters that are not masters themselves."""
        params = [param.data for param, _ in self._copied]
        masters = [master for _, master in self._copied]
        for pair in zip(_by_device(params), _by_device(masters), strict=True):
            torch._foreach_copy_(*pair)  # pyright: ignore[reportPrivateImportUsage]

    def state(self) -> dict[str, Tensor]:
        """Moments and, where they are not the parameters themselves, masters."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            moments = self.adamw.state[master]
            tensors[f"step.{name}"] = moments["step"]
            tensors[f"exp_avg.{name}"] = moments["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
            if master is not self.params[name]:
                tensors[f"master.{name}"] = master
        return tensors


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the fp32 norm of each tensor, in order, on one device."""
    # By device and tensor, because a list is not computed in one go over several devices.
    found: dict[int, Tensor] = {}
    for group in _by_device(tensors):
        norms = torch._foreach_norm(group)  # pyright: ignore[reportPrivateImportUsage]
        found |= dict(zip(map(id, group), norms, strict=True))
    return stacked([found[id(tensor)].float() for tensor in tensors])


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars on one device: on the GPU if one of them is there."""
    devices = dict.fromkeys(scalar.device for scalar in scalars)
    device = next((device for device in devices if device.type != "cpu"), next(iter(devices)))
    return torch.stack([scalar.to(device) for scalar in scalars])


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split a list by device, in order. Offloaded experts are in host memory, the rest is not."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


def _norm_of_quotient(mean: Tensor, square: Tensor, small: Tensor) -> Tensor:
    """Norm of mean / (sqrt(square) + small), by chunks: never a copy of a whole tensor."""
    chunks = zip(*(t.reshape(-1).split(CHUNK_ELEMENTS) for t in (mean, square)), strict=True)
    small = small.to(mean.device)
    norms = [torch.linalg.vector_norm(m / v.sqrt().add_(small)) for m, v in chunks]
    return torch.linalg.vector_norm(torch.stack(norms))


def _take_grad(master: Tensor, total: Tensor, param: Tensor) -> None:
    """Move the gradient that `backward` left on a parameter to its fp32 master."""
    assert param.grad is not None
    _add_to_master(master, total, param.grad)
    param.grad = None


def _add_to_master(master: Tensor, total: Tensor, grad: Tensor) -> None:
    """Add a gradient to `total`, which is the master's gradient from its first use on."""
    if master.grad is None:
        master.grad = total.copy_(grad)
    else:
        total.add_(grad)


def _master_of(param: Tensor) -> Tensor:
    """The parameter itself where it is fp32, else an fp32 copy of it."""
    return param if param.dtype == torch.float32 else param.detach().float().clone()
