"""The optimizer of a model: masters, summed gradients, and a rule that updates.

Parameters live in the compute dtype at fixed addresses. If that dtype is fp32, a parameter is its
own master. If it is bf16, the optimizer owns an fp32 master, and after a step the masters are
written back into the parameters in place; with `masters: bf16` there are none, and the rule rounds
its updates stochastically into the parameters. Gradients are summed in fp32 (gradients.py).

The rule is AdamW, Muon or Adafactor (catalogue.py). With `offload_to` its state and the masters
are in host memory, and pass through the device when they are updated (host_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from homeostat.config.optimizer import AnyOptimizer
from homeostat.errors import CheckpointError
from homeostat.ops.host_memory import HOST, HostMemory
from homeostat.ops.stochastic import tensor_key
from homeostat.train.optimizers.catalogue import rule_of
from homeostat.train.optimizers.gradients import Gradients, stacked, tensor_norms
from homeostat.train.optimizers.host_state import HostState
from homeostat.train.optimizers.slots import STEP, Rule, Slot
from homeostat.train.saving.frozen import checksums

# torch.nn.utils.clip_grad_norm_ adds the same, so that clipped norms agree with other trainers.
CLIP_EPS = 1e-6


class MasterOptimizer:
    """The optimizer of one model. State is allocated at once, so its size is known from the start.

    `seed` chooses the random bits of stochastic rounding. `offload_to` is the device that updates
    state in host memory; None where the state is beside its parameters.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        config: AnyOptimizer,
        *,
        seed: int = 0,
        offload_to: torch.device | None = None,
    ) -> None:
        self.params = {name: param for name, param in named if param.requires_grad}
        assert self.params, "nothing is trainable"
        self.config = config
        self.gradients = Gradients(self.params)
        self.rule = rule_of(config)
        memory = None if offload_to is None else HostMemory(pinned=offload_to.type == "cuda")
        how = {"seed": seed, "offload_to": offload_to, "memory": memory}
        self.slots = {
            name: make_slot(name, param, config, self.rule, **how)
            for name, param in self.params.items()
        }
        self.host: HostState | None = None
        if offload_to is not None:
            slots = [(slot, self.params[name]) for name, slot in self.slots.items()]
            away = {name for name, param in self.params.items() if param.device != offload_to}
            self.host = HostState(slots, self.rule, device=offload_to, on_host=away)
        self._norms: dict[str, Tensor] = {}

    @property
    def masters(self) -> dict[str, Tensor]:
        """Return the weights that are updated, by name; offloaded ones are in host memory."""
        self._settle()
        return {name: slot.master for name, slot in self.slots.items()}

    def zero_grad(self) -> None:
        self.gradients.clear()

    def grad_norm(self) -> Tensor:
        """Norm over all gradients, before clipping, as a device scalar."""
        return self.gradients.norm()

    @torch.no_grad()
    def step(
        self,
        *,
        learning_rate: float,
        grad_norm: float,
        max_grad_norm: float | None,
        measure: bool = False,
    ) -> None:
        """Update all parameters that have a gradient; with `measure`, record how far each tensor
        moved.
        """
        if max_grad_norm is not None:
            scale = max_grad_norm / (grad_norm + CLIP_EPS)
            if scale < 1.0:
                self.gradients.scale(scale)
        grads = self.gradients.present()
        self.rule.count([self.slots[name] for name in grads])
        how = {"learning_rate": learning_rate, "measure": measure}
        if self.host is not None:
            self._norms = self.host.update(grads, **how)
            return
        pieces = [self.slots[name].whole(grad) for name, grad in grads.items()]
        self._norms = dict(zip(grads, self.rule.update(pieces, **how), strict=False))
        self.write_back()

    def update_norms(self) -> Tensor:
        """Return the norm of each master's last measured update, without weight decay."""
        nothing = next(iter(self._norms.values())).new_zeros(())
        return stacked([self._norms.get(name, nothing) for name in self.slots])

    def num_updates(self) -> int:
        """Return the largest number of updates that the state of a tensor has seen.

        Tensors without a gradient, such as experts without tokens, are not counted.
        """
        counts = [slot.state[STEP] for slot in self.slots.values() if STEP in slot.state]
        return int(max(counts, key=float)) if counts else 0

    def checksums(self) -> dict[str, Tensor]:
        """Return a checksum of the bits of each master."""
        if self.host is None:
            return checksums((name, slot.master) for name, slot in self.slots.items())
        parts = self.host.masters()
        found: dict[str, Tensor] = {}
        for name, part in parts:
            total = checksums([(name, part)])[name]
            found[name] = found[name] + total if name in found else total
        # A rank may hold no row of a tensor.
        nothing = torch.zeros((), dtype=torch.int64, device=next(iter(found.values())).device)
        return {name: found.get(name, nothing) for name in self.slots}

    def master_norms(self) -> Tensor:
        """Return the norm of each master, in order."""
        if self.host is None:
            return tensor_norms([slot.master for slot in self.slots.values()])
        squares: dict[str, list[Tensor]] = {name: [] for name in self.slots}
        nothing = torch.zeros(())
        for name, part in self.host.masters():
            squares[name].append(torch.linalg.vector_norm(part.float()))
            nothing = part.new_zeros((), dtype=torch.float32)
        squares = {name: norms or [nothing] for name, norms in squares.items()}
        return stacked([torch.linalg.vector_norm(stacked(norms)) for norms in squares.values()])

    def write_back(self) -> None:
        """Copy the masters into the parameters that are not masters themselves."""
        groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for name, slot in self.slots.items():
            param = self.params[name].data
            if not slot.is_own:
                groups.setdefault((param.device, slot.master.device), []).append(
                    (param, slot.master)
                )
        for pairs in groups.values():
            params, masters = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(params, masters)

    def loaded(self) -> None:
        """Apply what was read from a checkpoint into the tensors of `state`."""
        self.write_back()
        if self.host is not None:
            self.host.forget()

    def state(self) -> dict[str, Tensor]:
        """Return the rule's state and, where they are not the parameters themselves, masters."""
        self._settle()
        tensors: dict[str, Tensor] = {}
        for name, slot in self.slots.items():
            tensors |= {f"{key}.{name}": tensor for key, tensor in slot.state.items()}
            if not slot.is_own:
                tensors[f"master.{name}"] = slot.master
        return tensors

    def _settle(self) -> None:
        """Wait until host memory holds the result of the last update."""
        if self.host is not None:
            self.host.settle()


def make_slot(
    name: str,
    param: Tensor,
    config: AnyOptimizer,
    rule: Rule,
    *,
    seed: int,
    offload_to: torch.device | None = None,
    memory: HostMemory | None = None,
) -> Slot:
    """Return a parameter's slot with new state; all but the count is in `memory`, if given."""
    decay = config.decay if param.ndim >= 2 else 0.0
    is_own = param.dtype == torch.float32 or config.masters == "bf16"
    place = param.device if memory is None else HOST
    master = param.detach() if is_own else param.detach().to(place, torch.float32, copy=True)
    state = rule.begin(name, master, device=place, computes=offload_to or param.device)
    if memory is not None:
        master = master if is_own else memory.keep(master)
        state = {key: t if key == STEP else memory.keep(t) for key, t in state.items()}
    return Slot(name, master, decay, tensor_key(seed, name), is_own, state)


def require_same_kind(own: Iterable[str], stored: Iterable[str]) -> None:
    """Raise CheckpointError if another kind of optimizer, or of moments, wrote the state."""
    kinds = [
        sorted({name.partition(".")[0] for name in names} - {"master"}) for names in (own, stored)
    ]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            "the optimizer state in the checkpoint is that of another optimizer: it holds "
            f"{', '.join(kinds[1])}, and trainer.optimizer needs {', '.join(kinds[0])}. Restore "
            "trainer.optimizer (type and moments), or give this run another name."
        )
