"""Open the transport that the recipe names."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from homeostat.config.cluster import LOOPBACK
from homeostat.config.sync import (
    AnyTransport,
    CollectiveConfig,
    CudaIpcConfig,
    DeltaConfig,
    DiskConfig,
    InProcessConfig,
    SharedMemoryConfig,
    TransportPlugin,
)
from homeostat.errors import SyncError
from homeostat.sync.bucket import Transport
from homeostat.sync.collective import CollectiveTransport
from homeostat.sync.cuda_ipc import CudaIpcTransport, Trial
from homeostat.sync.delta import DeltaTransport
from homeostat.sync.disk import DiskTransport
from homeostat.sync.in_process import InProcessTransport
from homeostat.sync.meeting import PREFIX
from homeostat.sync.shared_memory import SharedMemoryTransport


@dataclass(frozen=True, slots=True)
class TransportSite:
    """The facts of a run that opening a transport may need.

    `folder` belongs to the run, and `prefix` is a name for its files that no other run has.
    `device` holds the weights that are sent. Processes meet at the address `host`; the engine has
    `num_receivers` of them, on other machines if `over_hosts`. No wait may exceed `timeout_s`.
    """

    folder: Path
    prefix: str
    device: torch.device
    timeout_s: float
    host: str
    num_receivers: int
    over_hosts: bool


def open_transport(
    config: AnyTransport,
    *,
    folder: Path,
    device: torch.device,
    timeout_s: float,
    host: str = LOOPBACK,
    num_receivers: int = 1,
    over_hosts: bool = False,
    own_weights: bool = True,
    own: Mapping[str, Tensor] | None = None,
) -> Transport:
    """`folder` belongs to the run, `device` holds the weights that are sent; processes meet on the
    address `host`, or are `over_hosts`. With `own_weights` this process is the sender. `own` are
    the tensors of an engine that shares them."""
    prefix = f"homeostat-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
    match config:
        case TransportPlugin():
            site = TransportSite(folder, prefix, device, timeout_s, host, num_receivers, over_hosts)
            return config.open(site)
        case InProcessConfig():
            return InProcessTransport(own or {})
        case SharedMemoryConfig():
            return SharedMemoryTransport(prefix, config.bucket_bytes)
        case DiskConfig():
            place = folder if config.folder is None else Path(config.folder).resolve()
            return DiskTransport(place, prefix, config.bucket_bytes)
        case DeltaConfig():
            place = folder if config.folder is None else Path(config.folder).resolve()
            return DeltaTransport(place, prefix, config.bucket_bytes, secrets.token_hex(4))
        case CollectiveConfig():
            meeting = folder / f"{PREFIX}{secrets.token_hex(4)}"
            return CollectiveTransport(
                meeting, config.bucket_bytes, num_receivers, device, timeout_s, host, over_hosts
            )
        case CudaIpcConfig():
            if device.type != "cuda":
                raise SyncError(
                    f"sync.transport.type is cuda_ipc, and the weights are on the {device.type}. "
                    "Set it to shared_memory, or train on a GPU."
                )
            trial = Trial(device) if own_weights else None
            return CudaIpcTransport(device, config.bucket_bytes, trial)
