"""A copy of the policy's weights on this host, as they would be published."""

from __future__ import annotations

import os
from contextlib import closing

from torch import Tensor

from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.train.local import LocalTrainer
from homeostat.train.trainer import Trainer
from homeostat.types import Role

_BUCKET_BYTES = 64 * 2**20


def host_weights(trainer: Trainer) -> dict[str, Tensor]:
    """HF name -> tensor, wherever the trainer's ranks are."""
    if isinstance(trainer, LocalTrainer):
        return {name: tensor.cpu().clone() for name, tensor in trainer.weights(Role.POLICY)}
    transport = SharedMemoryTransport(f"homeostat-copy-{os.getpid()}", _BUCKET_BYTES)
    with closing(transport.packer()) as packer, closing(transport.receiver(0, 1)) as receiver:
        return {
            name: tensor.clone()
            for parcel in trainer.parcels(Role.POLICY, packer)
            for name, tensor in receiver.unpack(parcel)
        }
