"""A receiver of weights in a separate process: a state dict, driven over a pipe.

It is also a model: tensor "table" [V, V] has the logits of the next token by the one before, so
that it can be asked for log-probs. Every wait has a deadline, and the process ends with its parent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from tests.support.forks import Forked
from torch import Tensor

from homeostat.arrays import FloatArray
from homeostat.errors import SyncError
from homeostat.sync.bucket import Bucket, Packer, Receiver, Transport, entries_checksum
from homeostat.sync.collective import CollectiveReceiver
from homeostat.types import Completion, TokenRow

DEADLINE_S = 30.0
Arrived = tuple[str, torch.dtype, tuple[int, ...], bytes]


def table_logp(table_VV: Tensor, rows: Sequence[TokenRow], temperature: float) -> list[FloatArray]:
    logp_VV = torch.log_softmax(table_VV.float() / temperature, -1)
    return [logp_VV[row.tokens_T[:-1], row.tokens_T[1:]].cpu().numpy() for row in rows]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


class AlteringReceiver(CollectiveReceiver):
    """One bit is another after the broadcast."""

    def unpack(self, bucket: Bucket) -> Any:
        broadcast = self.group.broadcast

        def altered(flat: Tensor, address: str = "") -> None:
            broadcast(flat, address)
            flat[5] ^= 1

        self.group.broadcast = altered
        return super().unpack(bucket)


class Holder:
    """The child's side."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.entries: list[Any] = []
        self.version = 0
        self.fault = ""
        self.receiver: Receiver | None = None
        self.packer: Packer | None = None

    def connect(self, transport: Transport, rank: int = 0, size: int = 1, fault: str = "") -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = transport.receiver(rank, size)
        self.fault = fault
        if fault == "alter":
            self.receiver = AlteringReceiver(self.receiver.group)  # type: ignore[attr-defined]
        self.state, self.version = {}, 0

    def begin_update(self, how: str) -> list[Completion]:
        self.entries = []
        return []

    def apply(self, bucket: Bucket) -> None:
        assert self.receiver is not None
        if self.fault == "refuse":
            raise SyncError("out of order")
        # Copied, for the bytes are the sender's again after this.
        self.state |= {name: tensor.clone() for name, tensor in self.receiver.unpack(bucket)}
        if not (self.fault == "lose" and self.entries):
            self.entries += bucket.entries

    def commit(self, version: int) -> None:
        self.version = version
        if self.fault == "rot":
            self.state["table"] *= 1.01

    def received_checksum(self) -> str:
        return entries_checksum(self.entries)

    def policy_version(self) -> int:
        return self.version

    def score(self, rows: Sequence[TokenRow], temperature: float) -> list[FloatArray]:
        return table_logp(self.state["table"], rows, temperature)

    def arrived(self) -> list[Arrived]:
        """Return all tensors in the order of arrival; the memory of each bucket is reused."""
        items = self.state.items()
        return [(name, t.dtype, tuple(t.shape), raw(t)) for name, t in items]

    def start_packing(self, transport: Transport) -> Bucket:
        """The sender's side, begun and left."""
        self.packer = transport.packer()
        return next(iter(self.packer.pack([("w", torch.ones(1000))])))


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    holder = Holder()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(holder, method)(*arguments)))
        except SyncError as error:
            pipe.send((False, str(error)))


SERVE = """
from multiprocessing.connection import Connection
from tests.support.receiver import serve
serve(Connection(STREAMS[0]))
"""


class Child:
    """The parent's side. `call` waits for the answer, `send` and `result` are its halves."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), theirs.fileno()]
            self.process = Forked(SERVE, env=os.environ, streams=streams)
        self.pipe = Connection(ours.detach())

    def call(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.result()

    def send(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def result(self) -> Any:
        assert self.pipe.poll(DEADLINE_S), f"no answer within {DEADLINE_S} s"
        is_good, value = self.pipe.recv()
        if not is_good:
            raise SyncError(value)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.pipe.close()
        self.kill()


@dataclass(frozen=True)
class Can:
    shares_weights: bool = False


class Sink:
    """A child as the engine of a publication. `ends` is what its begin_update says has ended."""

    capabilities = Can()

    def __init__(self, child: Child, *, ends: Sequence[Completion] = ()) -> None:
        self.child = child
        self.ends = list(ends)
        self.quiesced: list[str] = []

    @property
    def policy_version(self) -> int:
        return self.child.call("policy_version")

    @property
    def received_checksum(self) -> str:
        return self.child.call("received_checksum")

    def begin_update(self, how: str, *, policy_id: str) -> list[Completion]:
        self.quiesced.append(how)
        self.child.call("begin_update", how)
        return self.ends

    def apply(self, bucket: Bucket) -> None:
        self.child.call("apply", bucket)

    def commit(self, version: int, *, policy_id: str) -> None:
        self.child.call("commit", version)

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        return self.child.call("score", rows, temperature)


def watch_threads(name: str) -> bool:
    """Return whether threads of this name have ended, soon."""
    deadline = time.monotonic() + DEADLINE_S
    while any(thread.name == name for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
