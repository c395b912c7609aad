"""Count the bytes of an optimizer, by making its state on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from homeostat.config.optimizer import AnyOptimizer
from homeostat.config.trainer import TrainerConfig
from homeostat.train.optimizers.catalogue import rule_of
from homeostat.train.optimizers.host_state import HostState
from homeostat.train.optimizers.optimizer import make_slot
from homeostat.train.optimizers.slots import STEP, Slot

_NOWHERE = torch.device("meta")


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """State and masters on the device and in host memory, and the additional bytes of an update."""

    device: int
    host: int
    work: int


def optimizer_bytes(
    config: AnyOptimizer,
    named: Iterable[tuple[str, Tensor]],
    trainer: TrainerConfig,
    on_host: Collection[Tensor],
) -> OptimizerBytes:
    """Return what an optimizer of these meta parameters keeps. `on_host` are in host memory."""
    rule = rule_of(config)
    pairs = [
        (make_slot(name, param, config, rule, seed=0, offload_to=_NOWHERE), param)
        for name, param in named
        if param.requires_grad
    ]
    work = max((rule.work(slot) for slot, _ in pairs), default=0)
    away = {slot.name for slot, param in pairs if param in on_host}
    sizes = {slot.name: _num_bytes(slot) for slot, _ in pairs}
    if trainer.backend.offload_optimizer and pairs:
        buffers = HostState(pairs, rule, device=_NOWHERE, on_host=away).device_bytes
        return OptimizerBytes(buffers, sum(sizes.values()), work)
    host = sum(sizes[name] for name in away)
    return OptimizerBytes(sum(sizes.values()) - host, host, work)


def _num_bytes(slot: Slot) -> int:
    state = sum(tensor.nbytes for name, tensor in slot.state.items() if name != STEP)
    return state + (0 if slot.is_own else slot.master.nbytes)
