"""Weights in GPU memory that both sides can access, for an engine on the trainer's GPU.

The sender reuses one buffer for all buckets, and passes on torch's IPC handle of it, as
torch.multiprocessing does. The sender waits for its copies before it passes on a bucket, and the
receiver waits for its own copies before it releases one, so no CUDA event has to be sent.

The transport is tested before it is used: it carries a few bytes in the same form, which a receiver
opens and verifies when it is created. Containers without a common IPC namespace, some allocators,
and processes that do not see the GPU fail in this test and not in the middle of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from homeostat.errors import SyncError
from homeostat.sync.bucket import Bucket
from homeostat.sync.layout import entries_of, fill, flat_bytes, grouped, verified, views

# Position of the device's index in the arguments of rebuild_cuda_tensor.
_DEVICE_ARGUMENT = 6


@dataclass(frozen=True, slots=True)
class CudaIpcBucket(Bucket):
    """`handle` rebuilds the buffer.

    `device` is the GPU's id; its index may differ between processes.
    """

    handle: tuple[Any, tuple[Any, ...]]
    device: str


class CudaIpcPacker:
    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self.device = device
        self.bucket_bytes = bucket_bytes
        self._flat: Tensor | None = None

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        for named in grouped(weights, bucket_bytes=self.bucket_bytes):
            entries = entries_of(named)
            num_bytes = flat_bytes(entries)
            if self._flat is None or len(self._flat) < num_bytes:
                self._flat = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device)
            fill(self._flat, named)
            torch.cuda.synchronize(self.device)
            gpu = _gpu_id(self._flat.device)
            yield CudaIpcBucket(entries, num_bytes, reduce_tensor(self._flat), gpu)

    def close(self) -> None:
        if self._flat is not None:
            self._flat = None
            torch.cuda.ipc_collect()


class CudaIpcReceiver:
    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(bucket, CudaIpcBucket), bucket
        rebuild, arguments = bucket.handle
        arguments = list(arguments)
        arguments[_DEVICE_ARGUMENT] = index = _index_of(bucket.device)
        try:
            flat = rebuild(*arguments)
        except RuntimeError as error:
            raise SyncError(_why_not("the engine", error)) from None
        yield from verified(bucket, views(flat, bucket.entries), transport=CudaIpcTransport.name)
        # The caller's copies may still be queued when the sender fills the buffer again.
        torch.cuda.synchronize(index)

    def close(self) -> None:
        """Do nothing: it holds no buffer between buckets."""


@dataclass(frozen=True)
class CudaIpcTransport:
    """`trial` is what receivers try to open first; None where the sender is another process than
    the one that opens the transport."""

    device: torch.device
    bucket_bytes: int
    trial: Trial | SentTrial | None = None
    name: ClassVar[str] = "cuda_ipc"

    def packer(self) -> CudaIpcPacker:
        return CudaIpcPacker(self.device, self.bucket_bytes)

    def receiver(self, rank: int, size: int) -> CudaIpcReceiver:
        receiver = CudaIpcReceiver()
        if self.trial is not None:
            list(receiver.unpack(self.trial.bucket))
        return receiver


class Trial:
    """A few bytes on the GPU, which live as long as this object; only their handle is pickled."""

    def __init__(self, device: torch.device) -> None:
        self._packer = CudaIpcPacker(device, 1)
        numbers = torch.arange(64, device=device)
        try:
            self.bucket = next(iter(self._packer.pack([("trial", numbers)])))
        except RuntimeError as error:
            raise SyncError(_why_not("the trainer", error)) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return SentTrial, (self.bucket,)


@dataclass(frozen=True, slots=True)
class SentTrial:
    """A trial in the receiver's process."""

    bucket: Bucket


def _why_not(who: str, error: RuntimeError) -> str:
    reason = str(error).partition("\n")[0]
    return (
        f"{who} cannot share memory of the GPU with another process ({reason}). Set "
        "sync.transport.type to shared_memory; or give both processes one IPC namespace "
        "(docker run --ipc=host), and leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF."
    )


def _gpu_id(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _index_of(gpu: str) -> int:
    for index in range(torch.cuda.device_count()):
        if _gpu_id(index) == gpu:
            return index
    raise SyncError(
        f"the weights are on GPU {gpu}, which this process of the engine does not see: cuda_ipc "
        "needs trainer and engine on the same GPU. Set sync.transport.type to collective."
    )
