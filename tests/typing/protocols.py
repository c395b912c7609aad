"""Every backend against the protocol that it claims: pyrefly checks these assignments (make types).

Backends are found by name (factories are import paths, classes come from registries), so no call
would show pyrefly that a class has drifted from its protocol. tests/style/test_protocols.py fails
while a backend is missing here.
"""

from __future__ import annotations

from homeostat.models.weights import Part, WholePart
from homeostat.rollout.engine import Engine
from homeostat.rollout.mirror import MirrorEngine
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.native.host import OwnWeightsEngine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.rollout.sglang.engine import SglangEngine
from homeostat.rollout.vllm.engine import VllmEngine
from homeostat.sync.bucket import Packer, Receiver, Transport
from homeostat.sync.collective import CollectivePacker, CollectiveReceiver, CollectiveTransport
from homeostat.sync.cuda_ipc import CudaIpcPacker, CudaIpcReceiver, CudaIpcTransport
from homeostat.sync.delta import DeltaPacker, DeltaReceiver, DeltaTransport
from homeostat.sync.disk import DiskPacker, DiskReceiver, DiskTransport
from homeostat.sync.in_process import InProcessPacker, InProcessReceiver, InProcessTransport
from homeostat.sync.shared_memory import (
    SharedMemoryPacker,
    SharedMemoryReceiver,
    SharedMemoryTransport,
)
from homeostat.train.fsdp.model import OwnPart
from homeostat.train.fsdp.sharding import FsdpShards
from homeostat.train.local import LocalTrainer
from homeostat.train.optimizers.adafactor import Adafactor
from homeostat.train.optimizers.adamw import AdamW
from homeostat.train.optimizers.muon import Muon
from homeostat.train.optimizers.slots import Rule
from homeostat.train.sharded import ShardedTrainer
from homeostat.train.sharding import Shards, Whole
from homeostat.train.trainer import Trainer
from homeostat.workers.channel import Channel, Listener, SocketChannel, SocketListener, TcpListener
from homeostat.workers.group import WorkerGroup
from homeostat.workers.in_process import InProcessGroup
from homeostat.workers.processes import ProcessGroup

ENGINES: list[type[Engine]] = [
    MirrorEngine,
    NativeEngine,
    OwnWeightsEngine,
    RemoteEngine,
    Router,
    SglangEngine,
    VllmEngine,
]
RULES: list[type[Rule]] = [Adafactor, AdamW, Muon]
PARTS: list[type[Part]] = [OwnPart, WholePart]
SHARDS: list[type[Shards]] = [FsdpShards, Whole]
TRAINERS: list[type[Trainer]] = [LocalTrainer, ShardedTrainer]
CHANNELS: list[type[Channel]] = [SocketChannel]
LISTENERS: list[type[Listener]] = [SocketListener, TcpListener]
WORKER_GROUPS: list[type[WorkerGroup]] = [InProcessGroup, ProcessGroup]
PACKERS: list[type[Packer]] = [
    CollectivePacker,
    CudaIpcPacker,
    DeltaPacker,
    DiskPacker,
    InProcessPacker,
    SharedMemoryPacker,
]
RECEIVERS: list[type[Receiver]] = [
    CollectiveReceiver,
    CudaIpcReceiver,
    DeltaReceiver,
    DiskReceiver,
    InProcessReceiver,
    SharedMemoryReceiver,
]
TRANSPORTS: list[type[Transport]] = [
    CollectiveTransport,
    CudaIpcTransport,
    DeltaTransport,
    DiskTransport,
    InProcessTransport,
    SharedMemoryTransport,
]
