"""What every weight transport must hold, with the receiver in a process of its own. A new one is an
entry in CONFIGS. (In process there is no other process: the receiver is the test's.)"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from tests.support.patience import eventually, patiently
from tests.support.receiver import Arrived, Child, Holder, Sink, raw, table_logp, watch_threads
from torch import Tensor

from homeostat.config.sync import AnyTransport
from homeostat.errors import SyncError
from homeostat.rollout.engine import Quiesce
from homeostat.sync import disk, shared_memory
from homeostat.sync.bucket import Bucket, Transport, entries_checksum
from homeostat.sync.collective import CollectiveBucket
from homeostat.sync.delta import BROKEN_OFF, FIRST
from homeostat.sync.in_process import InProcessTransport
from homeostat.sync.layout import entries_of, flat_bytes
from homeostat.sync.publish import Publisher
from homeostat.sync.transports import open_transport
from homeostat.sync.verify import Probe
from homeostat.types import Completion, Segment, StopReason, TokenRow

OTHERS = ["shared_memory", "disk", "delta", "collective"]
OTHERS += [pytest.param("cuda_ipc", marks=pytest.mark.gpu)]
KINDS = ["in_process", *OTHERS]
Weights = dict[str, Tensor]
Connect = Callable[..., tuple[Transport, Any]]


@pytest.fixture(scope="module")
def children() -> Iterator[list[Child]]:
    found = [Child(), Child(), Child()]
    yield found
    for child in found:
        child.close()


@pytest.fixture
def doomed() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


class Here:
    """A holder in this process, driven like a child."""

    def __init__(self) -> None:
        self.holder = Holder()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.holder, method)(*arguments)


def device_of(kind: str) -> torch.device:
    if kind == "cuda_ipc" and not torch.cuda.is_available():
        pytest.skip("no CUDA")
    return torch.device("cuda" if kind == "cuda_ipc" else "cpu")


def opened(
    kind: str,
    folder: Path,
    *,
    bucket_bytes: int = 4096,
    own: Weights | None = None,
    timeout_s: float = 20.0,
    num_receivers: int = 1,
) -> Transport:
    values = {"type": kind} | ({} if kind == "in_process" else {"bucket_bytes": bucket_bytes})
    return open_transport(
        TypeAdapter(AnyTransport).validate_python(values),
        folder=folder,
        device=device_of(kind),
        timeout_s=timeout_s,
        num_receivers=num_receivers,
        own=own,
    )


@pytest.fixture
def connect(tmp_path: Path, children: list[Child]) -> Connect:
    """The transport and a receiver that is connected to it."""

    def build(kind: str, *, fault: str = "", **settings: Any) -> tuple[Transport, Any]:
        transport = opened(kind, tmp_path, **settings)
        receiver = Here() if kind == "in_process" else children[0]
        receiver.call("connect", transport, 0, 1, fault)
        return transport, receiver

    return build


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
DTYPES += [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


def random_tensor(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Of any bits, NaNs with payloads among them."""
    top = 2 if dtype is torch.bool else 256
    flat = torch.empty(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8)
    flat.copy_(torch.from_numpy(rng.integers(0, top, len(flat), dtype=np.uint8)))
    return flat.view(dtype).view(shape)


def many_weights(seed: int, device: torch.device) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4), (40, 30)]
    weights = {
        f"{shape} {dtype}": random_tensor(rng, dtype, shape).to(device)
        for shape in shapes
        for dtype in DTYPES
    }
    base = random_tensor(rng, torch.bfloat16, (33, 17)).to(device)
    flat = random_tensor(rng, torch.float16, (101,)).to(device)
    large = random_tensor(rng, torch.float32, (300, 200)).to(device)
    weights |= {"transposed": base.T, "strided": base[::2, 1::3], "odd offset": flat[1:]}
    weights |= {"shared": base, "large": large, "parameter": torch.nn.Parameter(large[:9].clone())}
    names = list(weights)
    return {names[i]: weights[names[i]] for i in rng.permutation(len(names))}


def wanted(weights: Weights) -> list[Arrived]:
    return [(name, t.dtype, tuple(t.shape), raw(t.detach())) for name, t in weights.items()]


def send(transport: Transport, receiver: Any, weights: Weights) -> list[Bucket]:
    packer = transport.packer()
    buckets = []
    try:
        for bucket in packer.pack(iter(weights.items())):
            receiver.call("apply", bucket)
            buckets.append(bucket)
    finally:
        packer.close()
    return buckets


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 50_000, 10**7])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_arrive_bit_for_bit_in_order(
    connect: Connect, kind: str, bucket_bytes: int
) -> None:
    weights = many_weights(bucket_bytes, device_of(kind))
    transport, receiver = connect(kind, bucket_bytes=bucket_bytes, own=weights)
    buckets = send(transport, receiver, weights)
    assert receiver.call("arrived") == wanted(weights)
    assert [e.name for bucket in buckets for e in bucket.entries] == list(weights)
    for bucket in buckets:
        assert bucket.num_bytes >= sum(entry.num_bytes for entry in bucket.entries)
        if kind != "in_process":
            assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
    if bucket_bytes == 10**7:
        assert len(buckets) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_packer_sends_again_and_again(connect: Connect, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {f"w{i}": torch.zeros(600, device=device_of(kind)) for i in range(5)}
    transport, receiver = connect(kind, own=weights)
    # What travels to the trainer is a packer that was never used.
    packer = pickle.loads(pickle.dumps(transport.packer()))
    for _ in range(3):
        for tensor in weights.values():
            tensor.copy_(torch.from_numpy(rng.normal(size=600)))
        for bucket in packer.pack(weights.items()):
            receiver.call("apply", bucket)
        assert receiver.call("arrived") == wanted(weights)
    packer.close()
    packer.close()
    receiver.call("connect", transport)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, 2 if at < 0 else 0)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("kind", ["shared_memory", "disk", "delta", "collective"])
def test_an_altered_byte_is_noticed_and_the_tensor_named(connect: Connect, kind: str) -> None:
    # The 20th byte of the flat bucket, and the last of the file, are of the second tensor.
    weights = {"a": torch.zeros(0), "layers.7.w": torch.randn(9, 5)}
    fault = "alter" if kind == "collective" else ""
    transport, receiver = connect(kind, fault=fault)
    packer = transport.packer()
    buckets = packer.pack(weights.items())
    bucket: Any = next(buckets)
    if kind == "shared_memory":
        flip(bucket.segment, 20)
    if kind in ("disk", "delta"):
        flip(bucket.file, -1)
    with pytest.raises(
        SyncError, match=r"'layers\.7\.w' \(float32 \[9, 5\]\) was altered"
    ) as found:
        receiver.call("apply", bucket)
    assert f"{bucket.entries[1].checksum:016x} was sent" in str(found.value)
    buckets.close()
    packer.close()


# Several receivers.


def joined(transport: Transport, receivers: list[Child]) -> None:
    for rank, child in enumerate(receivers):
        child.call("connect", transport, rank, len(receivers))


@pytest.mark.parametrize("num_receivers", [2, 3])
@pytest.mark.parametrize("kind", OTHERS)
def test_all_of_several_receivers_get_the_same(
    tmp_path: Path, children: list[Child], kind: str, num_receivers: int
) -> None:
    weights = many_weights(num_receivers, device_of(kind))
    receivers = children[:num_receivers]
    transport = opened(kind, tmp_path, num_receivers=num_receivers)
    joined(transport, receivers)
    packer = transport.packer()
    for number in range(2):
        weights["large"][number] += 1
        for bucket in packer.pack(weights.items()):
            for child in receivers:
                child.send("apply", bucket)
            for child in receivers:
                child.result()
        arrived = [child.call("arrived") for child in receivers]
        assert arrived == [wanted(weights)] * num_receivers
    packer.close()


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("shared_memory", signal.SIGKILL),
        # Each starts a process, which takes seconds.
        pytest.param("collective", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("collective", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("shared_memory", signal.SIGSTOP, marks=pytest.mark.slow),
        *[
            pytest.param(kind, ending, marks=pytest.mark.slow)
            for kind in ("disk", "delta")
            for ending in (signal.SIGKILL, signal.SIGSTOP)
        ],
        pytest.param("cuda_ipc", signal.SIGKILL, marks=pytest.mark.gpu),
    ],
)
def test_a_receiver_that_dies_or_hangs_costs_the_others_nothing_or_is_named_in_time(
    tmp_path: Path, children: list[Child], doomed: Child, kind: str, ending: signal.Signals
) -> None:
    """A broadcast needs all of its members; every other transport continues with the rest."""
    receivers = [children[0], doomed, children[1]]
    device = device_of(kind)
    transport = opened(kind, tmp_path, num_receivers=3, timeout_s=3.0, bucket_bytes=1)
    joined(transport, receivers)
    weights = {f"w{i}": torch.randn(300, device=device) for i in range(3)}
    packer = transport.packer()
    buckets = packer.pack(weights.items())
    bucket = next(buckets)
    for child in receivers:
        child.send("apply", bucket)
    for child in receivers:
        child.result()
    started = time.monotonic()
    os.kill(doomed.process.pid, ending)
    alive = [children[0], children[1]]

    def send_the_rest() -> None:
        for bucket in buckets:
            for child in alive:
                child.send("apply", bucket)
            for child in alive:
                child.result()

    if kind == "collective":
        with pytest.raises(SyncError, match=r"receiver 1 of 3"):
            send_the_rest()
        for child in alive:
            while child.pipe.poll(5.0):
                child.pipe.recv()
    else:
        send_the_rest()
        assert [child.call("arrived") for child in alive] == [wanted(weights)] * 2
    assert time.monotonic() - started < 20
    buckets.close()
    packer.close()


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_full_disk_is_said_and_the_next_publication_is_whole(
    connect: Connect, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, receiver = connect(kind, bucket_bytes=1)
    weights = {f"w{i}": torch.randn(300) for i in range(3)}
    packer = transport.packer()
    for bucket in packer.pack(weights.items()):
        receiver.call("apply", bucket)
    plain, calls = disk.write_atomically, iter(range(10))

    def full(path: Path, content: bytes, *, sync: bool) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(path, content, sync=sync)

    weights["w0"][0] += 1
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_atomically", full)
        buckets = packer.pack(weights.items())
        receiver.call("apply", next(buckets))
        with pytest.raises(SyncError, match=r"No space left.*sync\.transport\.folder"):
            next(buckets)
    weights["w1"][0] += 1
    found = []
    for bucket in packer.pack(weights.items()):
        receiver.call("apply", bucket)
        found.append(bucket)
    assert receiver.call("arrived") == wanted(weights)
    if kind == "delta":
        assert {bucket.whole_because for bucket in found} == {BROKEN_OFF}
        assert sum(bucket.sent_bytes for bucket in found) == 3 * 300 * 4
    packer.close()


# Differences.


def test_only_what_changed_is_sent_and_the_result_is_exact(connect: Connect) -> None:
    transport, receiver = connect("delta", bucket_bytes=10_000)
    weights = {f"w{i}": torch.randn(4000).to(torch.bfloat16) for i in range(3)}
    packer = transport.packer()
    (first, *_) = sent = packed(packer, receiver, weights)
    assert first.whole_because == FIRST
    assert sum(bucket.sent_bytes for bucket in sent) == 3 * 4000 * 2
    weights["w1"][17] += 1
    weights["w1"][3999] = float("nan")
    sent = packed(packer, receiver, weights)
    assert receiver.call("arrived") == wanted(weights)
    assert {bucket.whole_because for bucket in sent} == {""}
    assert sum(bucket.sent_bytes for bucket in sent) < 200
    weights["w2"] = torch.randn(4000).to(torch.bfloat16)
    sent = packed(packer, receiver, weights)
    assert receiver.call("arrived") == wanted(weights)
    packer.close()


def packed(packer: Any, receiver: Any, weights: Weights) -> list[Any]:
    found = []
    for bucket in packer.pack(weights.items()):
        receiver.call("apply", bucket)
        found.append(bucket)
    return found


def test_a_difference_to_other_weights_is_refused(connect: Connect, children: list[Child]) -> None:
    transport, receiver = connect("delta", bucket_bytes=10_000)
    weights = {"w": torch.randn(4000)}
    packer = transport.packer()
    packed(packer, receiver, weights)
    weights["w"][3] += 1
    (bucket,) = packer.pack(weights.items())
    late = children[1]
    late.call("connect", transport, 0, 1)
    with pytest.raises(SyncError, match=r"difference to publication 1, and this engine holds None"):
        late.call("apply", bucket)
    packer.close()


# In process.


def test_in_process_copies_nothing_and_refuses_other_memory() -> None:
    weights = {"w": torch.randn(5), "v": torch.randn(5)}
    transport = InProcessTransport({"w": weights["w"], "v": weights["v"].clone()})
    packer = transport.packer()
    (shared,), (other,) = (packer.pack([(name, weights[name])]) for name in ("w", "v"))
    ((_, tensor),) = transport.receiver(0, 1).unpack(shared)
    assert tensor.data_ptr() == weights["w"].data_ptr()
    with pytest.raises(SyncError, match=r"'v' .* has it in other memory.*sync\.transport"):
        list(transport.receiver(0, 1).unpack(other))
    with pytest.raises(SyncError, match="the engine has no such tensor"):
        list(InProcessTransport({}).receiver(0, 1).unpack(shared))
    with pytest.raises(SyncError, match="another process"):
        pickle.dumps(shared)


# Shared memory.


def segments(transport: Transport) -> list[Path]:
    return list(shared_memory.ROOT.glob(f"{transport.prefix}-*"))  # type: ignore[attr-defined]


def test_shared_memory_is_bounded_by_the_bucket_and_left_clean(connect: Connect) -> None:
    transport, receiver = connect("shared_memory", bucket_bytes=8192)
    packer = transport.packer()
    buckets = packer.pack((f"w{i}", torch.randn(512)) for i in range(40))
    count = 0
    for bucket in buckets:
        count += 1
        receiver.call("apply", bucket)
        assert 0 < sum(path.stat().st_size for path in segments(transport)) <= 8192
    assert count == 10
    packer.close()
    assert not segments(transport)


def test_segments_of_a_killed_sender_go_and_no_others(tmp_path: Path, doomed: Child) -> None:
    killed, other = opened("shared_memory", tmp_path / "a"), opened("shared_memory", tmp_path / "b")
    doomed.call("start_packing", killed)
    alive = killed.packer()
    for _ in alive.pack([("w", torch.ones(3))]):
        pass
    foreign = shared_memory.ROOT / f"{other.prefix}-1-killed"  # type: ignore[attr-defined]
    foreign.touch()
    try:
        assert len(segments(killed)) == 2, "a living sender's segment was taken for a stale one"
        doomed.kill()
        assert len(segments(killed)) == 2
        packer = killed.packer()
        next(iter(packer.pack([("w", torch.ones(3))])))
        assert len(segments(killed)) == 2, "the dead one's is gone, two living ones are left"
        assert foreign.exists()
        packer.close()
        alive.close()
        assert not segments(killed)
    finally:
        foreign.unlink()


def test_a_sender_that_ends_by_an_error_leaves_no_segment(tmp_path: Path, doomed: Child) -> None:
    transport = opened("shared_memory", tmp_path)
    doomed.call("start_packing", transport)
    assert len(segments(transport)) == 1
    doomed.send("no_such_method")
    assert doomed.process.wait(20) == 1
    assert not segments(transport)


def test_a_segment_that_is_gone_is_named(connect: Connect) -> None:
    transport, receiver = connect("shared_memory")
    packer = transport.packer()
    bucket = next(iter(packer.pack([("w", torch.ones(3))])))
    packer.close()
    with pytest.raises(SyncError, match=r"'w' .*No such file.*sender still alive"):
        receiver.call("apply", bucket)


# Collective.


def test_a_group_over_several_hosts_meets_without_a_common_folder(
    tmp_path: Path, children: list[Child]
) -> None:
    weights = many_weights(5, torch.device("cpu"))
    transport = replace(opened("collective", tmp_path, num_receivers=2), over_hosts=True)
    receivers = children[:2]
    joined(transport, receivers)
    packer = transport.packer()
    for bucket in packer.pack(weights.items()):
        assert bucket.address.startswith("127.0.0.1:")
        for child in receivers:
            child.send("apply", bucket)
        for child in receivers:
            child.result()
    assert [child.call("arrived") for child in receivers] == [wanted(weights)] * 2
    assert not list(tmp_path.iterdir())
    packer.close()


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_who_starts_first_does_not_matter(connect: Connect, first: str) -> None:
    weights = {"w": torch.randn(100)}
    transport, receiver = connect("collective")
    packer = transport.packer()
    buckets = packer.pack(weights.items())
    if first == "sender":
        bucket = next(buckets)
        time.sleep(0.3)
        receiver.call("apply", bucket)
    else:
        entries = entries_of(list(weights.items()))
        receiver.send("apply", CollectiveBucket(entries, flat_bytes(entries)))
        time.sleep(0.3)
        next(buckets)
        receiver.result()
    assert not list(buckets)
    packer.close()
    assert receiver.call("arrived") == wanted(weights)


def test_a_receiver_that_never_comes_is_named(tmp_path: Path) -> None:
    packer = opened("collective", tmp_path, num_receivers=2, timeout_s=0.3).packer()
    buckets = packer.pack([("w", torch.ones(3))])
    next(buckets)
    with pytest.raises(SyncError, match="missing: receiver 0 of 2, receiver 1 of 2") as found:
        next(buckets)
    assert "sync.timeout_s" in str(found.value)
    with pytest.raises(SyncError, match="cannot be used again"):
        next(packer.pack([("w", torch.ones(3))]))
    packer.close()


def test_a_receiver_that_lives_but_does_not_take_part_is_an_error(connect: Connect) -> None:
    def check(limit_s: float) -> None:
        transport, receiver = connect("collective", bucket_bytes=1, timeout_s=limit_s)
        packer = transport.packer()
        buckets = packer.pack([("w", torch.ones(3)), ("v", torch.ones(3))])
        receiver.call("apply", next(buckets))
        next(buckets)
        with pytest.raises(SyncError, match="all processes live, and receiver 0 of 1 did not"):
            next(buckets)
        packer.close()

    patiently(check)


def test_a_second_sender_of_one_group_is_refused(tmp_path: Path) -> None:
    transport = opened("collective", tmp_path, timeout_s=0.3)
    for message in ("missing: receiver 0 of 1", "the sender cannot take its place"):
        with pytest.raises(SyncError, match=message):
            list(transport.packer().pack([("w", torch.ones(3))]))


def test_a_sender_that_never_comes_is_named(connect: Connect) -> None:
    _, receiver = connect("collective", timeout_s=0.3)
    entries = entries_of([("w", torch.ones(3))])
    with pytest.raises(SyncError, match=r"failed at receiver 0 of 1: missing: the sender"):
        receiver.call("apply", CollectiveBucket(entries, flat_bytes(entries)))


@pytest.mark.parametrize(
    "size",
    [pytest.param(10, id="small"), pytest.param(5_000_000, id="large", marks=pytest.mark.slow)],
)
def test_a_receiver_that_dies_is_named(
    tmp_path: Path, children: list[Child], doomed: Child, size: int
) -> None:
    transport = opened("collective", tmp_path, num_receivers=2, timeout_s=10, bucket_bytes=1)
    members = [children[0], doomed]
    for rank, child in enumerate(members):
        child.call("connect", transport, rank, 2)
    packer = transport.packer()
    buckets = packer.pack((f"w{i}", torch.randn(size)) for i in range(3))
    bucket = next(buckets)
    for child in members:
        child.send("apply", bucket)
    for child in members:
        child.result()
    # The next one is on its way when a receiver dies; nobody waits for the body.
    bucket = next(buckets)
    doomed.process.kill()
    children[0].send("apply", bucket)
    with pytest.raises(SyncError, match=r"missing: receiver 1 of 2 "):
        list(buckets)
    with suppress(SyncError):
        children[0].result()
    packer.close()
    assert watch_threads("weights-broadcast")


def test_a_killed_senders_meeting_place_is_removed(tmp_path: Path, doomed: Child) -> None:
    doomed.call("start_packing", opened("collective", tmp_path))
    assert eventually(lambda: any(tmp_path.glob("*/rank_0")))
    doomed.kill()
    packer = opened("collective", tmp_path, timeout_s=0.1).packer()
    buckets = packer.pack([("w", torch.ones(3))])
    next(buckets)
    with pytest.raises(SyncError):
        next(buckets)
    assert len(list(tmp_path.iterdir())) == 1
    packer.close()
    assert not list(tmp_path.iterdir())


# Publication.


class Source:
    """A trainer of a table."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.weights = {"table": torch.randn(64, 64), "norm": torch.randn(64), "x": torch.ones(9)}
        self.weights = {name: tensor.to(device) for name, tensor in self.weights.items()}

    def weight_buckets(self, packer: Any) -> Iterator[Bucket]:
        return packer.pack(self.weights.items())

    def score(self, rows: list[TokenRow], *, temperature: float) -> list[Any]:
        return table_logp(self.weights["table"].cpu(), rows, temperature)


PROBE = Probe(vocabulary=64, num_layers=1, dtype=torch.float32, temperature=0.7)


def cut_completion() -> Completion:
    segment = Segment(np.arange(3), np.zeros(3, dtype=np.float32), policy_version=4)
    return Completion("r", (segment,), StopReason.ABORTED)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_publication_is_taken_in_and_proven(connect: Connect, kind: str) -> None:
    transport, receiver = connect(kind, bucket_bytes=300)
    source, ended = Source(device=str(device_of(kind))), []
    sink = Sink(receiver, ends=[cut_completion()])
    publisher = Publisher(transport, probe=PROBE)
    for version in (3, 3, 8):
        source.weights["table"] += torch.randn_like(source.weights["table"])
        base = receiver.call("policy_version")
        manifest = publisher.publish(
            source, sink, version=version, quiesce=Quiesce.ABORT, on_ended=ended.extend
        )
        assert (manifest.version, manifest.base_version) == (version, base)
        assert manifest.checksum == entries_checksum(entries_of(list(source.weights.items())))
        assert (manifest.num_tensors, manifest.num_bytes) == (3, 4 * (64 * 64 + 64 + 9))
        assert manifest.transport == kind
        assert manifest.seconds > 0
        assert receiver.call("arrived") == wanted(source.weights)
        assert receiver.call("policy_version") == version
    assert [completion.request_id for completion in ended] == ["r"] * 3
    assert sink.quiesced == [Quiesce.ABORT] * 3
    with pytest.raises(SyncError, match="versions never go back"):
        publisher.publish(source, sink, version=7, quiesce=Quiesce.DRAIN, on_ended=ended.extend)
    assert len(sink.quiesced) == 3, "the engine was not touched"
    publisher.close()


def publish(connect: Connect, fault: str) -> tuple[Any, list[Completion], str]:
    transport, receiver = connect("shared_memory", bucket_bytes=300, fault=fault)
    publisher, ended = Publisher(transport, probe=PROBE), []
    sink = Sink(receiver, ends=[cut_completion()])
    with pytest.raises(SyncError) as found:
        publisher.publish(Source(), sink, version=5, quiesce=Quiesce.DRAIN, on_ended=ended.extend)
    publisher.close()
    assert not segments(transport)
    return receiver, ended, str(found.value)


def test_what_fails_before_commit_leaves_the_engine_uncommitted(connect: Connect) -> None:
    receiver, ended, message = publish(connect, "refuse")
    assert "out of order" in message
    assert "without commit, between version 0 and 5" in message
    assert receiver.call("policy_version") == 0
    assert [completion.request_id for completion in ended] == ["r"], "lost what had ended"


def test_an_engine_that_lost_a_tensor_is_noticed(connect: Connect) -> None:
    _, _, message = publish(connect, "lose")
    assert "does not serve the weights that were published as version 5" in message
    assert "Tensors were lost" in message


def test_an_engine_that_computes_with_other_weights_is_noticed(connect: Connect) -> None:
    _, _, message = publish(connect, "rot")
    assert "does not serve the weights that were published as version 5" in message
    assert "of 45 probe tokens are off" in message
    assert "is the limit in float32" in message
