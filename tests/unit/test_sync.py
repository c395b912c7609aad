"""Parts of weight transport: checksums, buckets, full disks, proofs, and the native engine's."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from tests.parity.tiny_models import FAMILIES, random_model, save
from torch import Tensor

from homeostat.arrays import FloatArray
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.sync import AnyTransport, SharedMemoryConfig, SyncConfig
from homeostat.errors import SyncError, TrainerLostError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.rollout.engine import Quiesce
from homeostat.rollout.native.engine import NativeEngine
from homeostat.sync.bucket import Bucket, Manifest, Transport, entries_checksum
from homeostat.sync.checksum import tensor_checksum, tensor_checksums
from homeostat.sync.in_process import InProcessTransport
from homeostat.sync.layout import entries_of, fill, flat_bytes, grouped, views
from homeostat.sync.publish import Publisher
from homeostat.sync.shared_memory import ROOT
from homeostat.sync.transports import open_transport
from homeostat.sync.verify import Probe, require_served
from homeostat.types import TokenRow

CPU = torch.device("cpu")
MASK = 2**64 - 1


def opened(run_dir: Path, **values: Any) -> Transport:
    config = TypeAdapter(AnyTransport).validate_python(values)
    return open_transport(config, folder=run_dir, device=CPU, timeout_s=10)


# Checksums.


def odd_number(stream: int, index: int) -> int:
    z = (index + 1 + (stream << 48)) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31 | 1


def reference_checksum(data: bytes) -> int:
    """The formula in whole numbers of Python."""
    total = 0
    for index in range(0, len(data), 8):
        word = int.from_bytes(data[index : index + 8].ljust(8, b"\0"), "little")
        row, column = divmod(index // 8, 4096)
        total += odd_number(2, row) * odd_number(1, column) * (word ^ word >> 32)
    return total & MASK


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096 * 8 - 1, 4096 * 8, 4096 * 8 * 18 + 5])
def test_the_checksum_is_the_formula(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert tensor_checksum(torch.from_numpy(data)) == reference_checksum(data.tobytes())


def test_the_checksum_is_of_bits_in_order_not_of_memory() -> None:
    base = torch.randn(50, 40)
    turned = base.T
    assert tensor_checksum(turned) == tensor_checksum(turned.contiguous())
    assert tensor_checksum(turned) != tensor_checksum(base)
    # Starts at an odd word, and at an odd address.
    assert tensor_checksum(base.view(-1)[1:]) == tensor_checksum(base.view(-1)[1:].clone())
    data = base.view(-1).view(torch.uint8)[3:]
    assert tensor_checksums([data, base]) == [tensor_checksum(data.clone()), tensor_checksum(base)]


@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(["float32", "bfloat16", "int64"]))
def test_an_altered_bit_or_a_swap_is_always_noticed(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    tensor = torch.from_numpy(rng.integers(-3, 4, (300, 50))).to(getattr(torch, dtype))
    before = tensor_checksum(tensor)
    data = tensor.view(torch.uint8).view(-1)
    at, bit = rng.integers(len(data)), rng.integers(8)
    data[at] ^= 1 << int(bit)
    assert tensor_checksum(tensor) != before
    data[at] ^= 1 << int(bit)
    a, b = rng.integers(300, size=2)
    swapped = tensor.clone()
    swapped[[a, b]] = tensor[[b, a]]
    assert (tensor_checksum(swapped) == before) == torch.equal(swapped, tensor)
    flat, other = tensor.view(-1), tensor.clone().view(-1)
    i, j = rng.integers(len(flat), size=2)
    other[i], other[j] = flat[j], flat[i]
    assert (tensor_checksum(other) == before) == torch.equal(other, flat)


def test_swaps_of_words_that_differ_in_sign_or_exponent_alone_are_noticed() -> None:
    """What a plain sum with odd multipliers misses: half of all swaps of a top bit."""
    for high in (-1.0, 0.5, 2.0):
        tensor = torch.ones(2000)
        tensor[1] = high
        before = tensor_checksum(tensor)
        for at in range(3, 2000, 2):
            other = torch.ones(2000)
            other[at] = high
            assert tensor_checksum(other) != before, (high, at)


@pytest.mark.gpu
def test_the_checksum_is_the_same_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    tensor = torch.randn(5_000_001)
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)


def test_the_checksum_over_all_tells_names_dtypes_shapes_and_order() -> None:
    one, two = entries_of([("a", torch.zeros(4)), ("b", torch.zeros(4))])
    (other,) = entries_of([("a", torch.zeros(2, 2))])
    (integers,) = entries_of([("a", torch.zeros(4, dtype=torch.int32))])
    lists = [[one], [two], [other], [integers], [one, two], [two, one], [one, one], []]
    assert len({entries_checksum(entries) for entries in lists}) == len(lists)


# Buckets.


@given(
    sizes=st.lists(st.integers(0, 60), max_size=20),
    bucket_bytes=st.integers(1, 400),
    seed=st.integers(0, 1000),
)
def test_buckets_keep_order_and_size(sizes: list[int], bucket_bytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.int64]
    weights = [
        (str(i), torch.from_numpy(rng.integers(0, 9, size)).to(dtypes[rng.integers(4)]))
        for i, size in enumerate(sizes)
    ]
    found: list[tuple[str, Tensor]] = []
    for named in grouped(weights, bucket_bytes=bucket_bytes):
        entries = entries_of(named)
        flat = torch.full((flat_bytes(entries),), 255, dtype=torch.uint8)
        assert len(flat) <= bucket_bytes or len(named) == 1
        fill(flat, named)
        found += zip((entry.name for entry in entries), views(flat, entries), strict=True)
    assert [name for name, _ in found] == [name for name, _ in weights]
    for (_, a), (_, b) in zip(found, weights, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# No room.


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


WEIGHTS = [("small", torch.ones(100)), ("large", torch.ones(20_000))]


def test_no_room_in_shared_memory_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    transport = opened(tmp_path, type="shared_memory", bucket_bytes=1)
    packer = transport.packer()
    with files_of_at_most(10_000), pytest.raises(SyncError) as found:
        list(packer.pack(WEIGHTS))
    assert "sync.transport.bucket_bytes" in str(found.value)
    assert "0.08 MB" in str(found.value)
    assert not list(ROOT.glob(f"{transport.prefix}*"))  # type: ignore[attr-defined]
    assert len(list(packer.pack(WEIGHTS))) == 2, "and it works again once there is room"
    packer.close()


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    packer = opened(tmp_path, type="disk", bucket_bytes=1).packer()
    earlier = [bucket.file for bucket in packer.pack(WEIGHTS)]  # type: ignore[attr-defined]
    with files_of_at_most(10_000), pytest.raises(SyncError, match=r"sync\.transport\.folder"):
        list(packer.pack(WEIGHTS))
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == earlier


def test_files_of_the_version_before_go_when_the_next_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "fast disk"
    (place / "mine").mkdir(parents=True)
    packer = opened(tmp_path / "run", type="disk", bucket_bytes=1, folder=str(place)).packer()

    def folders() -> int:
        return len(list(place.iterdir())) - 1

    for _ in range(3):
        for _ in packer.pack(WEIGHTS):
            assert 1 <= folders() <= 2
        assert folders() == 1
    buckets = packer.pack(WEIGHTS)
    next(buckets)
    buckets.close()
    assert folders() == 1, "a publication that was given up stays"
    packer.close()
    assert [path.name for path in place.iterdir()] == ["mine"]


def test_a_file_that_is_gone_or_torn_is_named(tmp_path: Path) -> None:
    transport = opened(tmp_path, type="disk")
    buckets = transport.packer().pack(WEIGHTS[:1])
    bucket: Any = next(buckets)
    bucket.file.write_bytes(bucket.file.read_bytes()[:-9])
    with pytest.raises(SyncError, match=f"cannot read {bucket.file} with 'small'"):
        list(transport.receiver(0, 1).unpack(bucket))
    bucket.file.unlink()
    with pytest.raises(SyncError, match=f"cannot read {bucket.file}"):
        list(transport.receiver(0, 1).unpack(bucket))


# The proof.

MANIFEST = Manifest("policy", 3, 2, "disk", "", 0, 0, 0.0)


def test_probe_rows_are_fixed_and_within_the_vocabulary() -> None:
    first, again = Probe(11, 2, torch.float32).rows(), Probe(11, 2, torch.float32).rows()
    assert all((a.tokens_T == b.tokens_T).all() for a, b in zip(first, again, strict=True))
    tokens = np.concatenate([row.tokens_T for row in first])
    assert 24 <= len(tokens) <= 64
    assert tokens.min() >= 0
    assert tokens.max() <= 10


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 6.5e-5), (torch.bfloat16, 0.0654), (torch.float16, 8.2e-3)]
)
def test_the_limit_scales_with_dtype_and_log_prob(dtype: torch.dtype, limit: float) -> None:
    probe = Probe(100, 28, dtype)
    assert probe.tolerance == pytest.approx(limit, rel=0.01)
    trainer = [np.array([-0.5, -9.0], dtype=np.float32)]

    def judge(difference: float) -> None:
        engine = [np.array([-0.5, -9.0 + difference])]
        require_served(MANIFEST, probe, trainer_logp=trainer, engine_logp=engine)

    judge(9.9 * limit)
    with pytest.raises(SyncError, match=r"1 of 2 probe tokens are off.*the limit"):
        judge(10.1 * limit)
    with pytest.raises(SyncError, match="does not serve the weights that were published"):
        judge(float("nan"))


# The native engine, sharing its weights and with a copy of them.


def tiny_model(seed: int) -> Decoder:
    with TemporaryDirectory() as folder:
        theirs = random_model({**FAMILIES["qwen3"], "vocab_size": 97}, seed=seed)
        path = str(save(theirs, Path(folder)))
        place = {"dtype": torch.float32, "device": CPU, "seed": 0, "gradient_checkpointing": False}
        loaded = load_model(ModelConfig(path=path), None, **place)
    assert isinstance(loaded.module, Decoder)
    return loaded.module


def native(model: Decoder) -> NativeEngine:
    place = {"device": CPU, "max_tokens": 64, "chunk_bytes": 1 << 16, "decode": None}
    return NativeEngine(model, NativeEngineConfig(), **place)


class Copied:
    """A native engine with weights of its own."""

    def __init__(self, engine: NativeEngine, transport: Transport) -> None:
        self.engine = engine
        self.own = dict(engine.model.named_parameters())
        self.capabilities = replace(engine.capabilities, shares_weights=False)
        self.receiver = transport.receiver(0, 1)
        self.entries: list[Any] = []
        self.skipped = ""
        self.score, self.commit = engine.score, engine.commit

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def received_checksum(self) -> str:
        return entries_checksum(self.entries)

    def begin_update(self, how: Quiesce, *, policy_id: str) -> list[Any]:
        self.entries = []
        return self.engine.begin_update(how, policy_id=policy_id)

    def apply(self, bucket: Bucket) -> None:
        with torch.no_grad():
            for name, tensor in self.receiver.unpack(bucket):
                if name != self.skipped:
                    self.own[name].copy_(tensor)
        self.entries += bucket.entries


class Source:
    """The trainer's half, scored by the trainer's own forward."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def weight_buckets(self, packer: Any) -> Iterator[Bucket]:
        return packer.pack(self.model.named_parameters())

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        return native(self.model).score(rows, temperature=temperature)


def probe_of(model: Decoder) -> Probe:
    return Probe(model.config.vocab_size, model.config.num_layers, torch.float32)


def publish(publisher: Publisher, source: Source, engine: Any, version: int = 1) -> Manifest:
    return publisher.publish(
        source, engine, version=version, quiesce=Quiesce.DRAIN, on_ended=lambda ended: None
    )


def test_a_native_engine_with_a_copy_is_proven_by_its_log_probs(tmp_path: Path) -> None:
    source, transport = Source(tiny_model(0)), opened(tmp_path, type="shared_memory")
    engine = Copied(native(tiny_model(1)), transport)
    publisher = Publisher(transport, probe=probe_of(source.model))
    publish(publisher, source, engine)
    # All arrives, and one matrix is put in the wrong place: only the log-probs can tell.
    with torch.no_grad():
        for parameter in source.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    engine.skipped = max(engine.own, key=lambda name: engine.own[name].numel())
    with pytest.raises(SyncError, match="probe tokens are off"):
        publish(publisher, source, engine, version=2)
    publisher.close()


def test_ranks_that_are_lost_while_they_send_are_no_fault_of_the_transport(tmp_path: Path) -> None:
    """The run restarts lost ranks, and ends where weights did not arrive for another reason."""

    class Lost(Source):
        def weight_buckets(self, packer: Any) -> Iterator[Bucket]:
            raise TrainerLostError("trainer rank 1 was ended by SIGKILL")

    transport = opened(tmp_path, type="shared_memory")
    publisher = Publisher(transport, probe=None)
    with pytest.raises(TrainerLostError, match="rank 1"):
        publish(publisher, Lost(tiny_model(0)), Copied(native(tiny_model(1)), transport))
    publisher.close()


def test_an_engine_that_shares_weights_is_proven_to() -> None:
    model = tiny_model(0)
    engine = native(model)
    own = dict(model.named_parameters())
    manifest = publish(
        Publisher(InProcessTransport(own), probe=probe_of(model)), Source(model), engine
    )
    assert manifest.num_tensors == len(own)
    assert engine.policy_version == 1
    stranger = native(tiny_model(0))
    publisher = Publisher(
        InProcessTransport(dict(stranger.model.named_parameters())), probe=probe_of(model)
    )
    with pytest.raises(SyncError, match="is not shared: the engine has it in other memory"):
        publish(publisher, Source(model), stranger)
    assert stranger.policy_version == 0


# Config.


def test_sync_settings() -> None:
    config = SyncConfig.model_validate({"transport": {"type": "disk", "bucket_bytes": "64MiB"}})
    assert config.transport is not None
    assert config.transport.bucket_bytes == 64 * 2**20  # type: ignore[union-attr]
    assert SyncConfig().transport is None
    assert SharedMemoryConfig().bucket_bytes == 2**28
    for wrong in ({"type": "in_process", "bucket_bytes": 5}, {"type": "disk", "bucket_bytes": 0}):
        with pytest.raises(ValidationError):
            SyncConfig.model_validate({"transport": wrong})


def test_gpu_memory_cannot_be_shared_from_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"cuda_ipc, and the weights are on the cpu"):
        opened(tmp_path, type="cuda_ipc")


def test_a_collective_for_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="has 2 processes, and the group was opened for 1"):
        opened(tmp_path, type="collective").receiver(0, 2)
