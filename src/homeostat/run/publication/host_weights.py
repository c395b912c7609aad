"""The policy's weights as they are published: from the trainer itself, or as a copy on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from homeostat.arrays import FloatArray
from homeostat.sync.bucket import Bucket, Packer
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.train.local import LocalTrainer
from homeostat.train.scoring import score
from homeostat.train.trainer import Trainer
from homeostat.types import Role, TokenRow, TrainBatch

_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """The trainer as a source of weights."""

    trainer: Trainer

    def weight_buckets(self, packer: Packer) -> Iterator[Bucket]:
        return self.trainer.weight_buckets(Role.POLICY, packer)

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        batches = [TrainBatch.of([row]) for row in rows]
        return score(self.trainer, Role.POLICY, batches, temperature=temperature)


def host_weights(trainer: Trainer) -> dict[str, Tensor]:
    """HF name -> tensor, wherever the trainer's ranks are."""
    if isinstance(trainer, LocalTrainer):
        return {name: tensor.cpu().clone() for name, tensor in trainer.weights(Role.POLICY)}
    transport = SharedMemoryTransport(f"homeostat-copy-{os.getpid()}", _BUCKET_BYTES)
    packer = transport.packer()
    try:
        with closing(packer), closing(transport.receiver(0, 1)) as receiver:
            return {
                name: tensor.clone()
                for bucket in trainer.weight_buckets(Role.POLICY, packer)
                for name, tensor in receiver.unpack(bucket)
            }
    finally:
        trainer.forget_packer(packer)
