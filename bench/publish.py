"""Claim: new weights of a 0.5 B model reach an engine on the same GPU within 100 ms, checksums
included, from the moment at which the engine is quiet to the one at which it samples again.

Seconds and bytes of one publication by every transport, from begin to commit, median of some: to
one native engine in a separate process (shared memory, disk, delta, broadcast by gloo on a CPU;
CUDA IPC on a GPU), and to an engine that computes with the trainer's tensors (`in_process`, where
every tensor is proven to be the same memory, with its checksum). Between publications the weights
change as by an update: a share of their bf16 numbers moves by one unit in the last place.

    make bench-publish
    python bench/publish.py --device cuda                   # CUDA IPC and zero-copy
    python bench/publish.py --tiny                          # proves the script
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import common
import torch
from pydantic import TypeAdapter
from shapes import SHAPES, random_decoder, write_folder
from torch import Tensor

from homeostat.arrays import FloatArray
from homeostat.config.cluster import InProcessCluster
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.sync import AnyTransport
from homeostat.config.trainer import TrainerConfig
from homeostat.models.decoder import Decoder
from homeostat.rollout.engine import Engine, Quiesce
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.registry import ENGINES
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.server import SERVER
from homeostat.sync.bucket import Bucket, Packer
from homeostat.sync.publish import Publisher
from homeostat.sync.transports import open_transport
from homeostat.types import TokenRow
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

KINDS = {
    "cpu": ("in_process", "shared_memory", "collective", "disk", "delta"),
    "cuda": ("in_process", "cuda_ipc", "shared_memory", "collective", "disk", "delta"),
}
ROUNDS, MAX_TOKENS = 5, 128
# The share of bf16 numbers that one update moves by a unit in the last place (publish_delta.py).
CHANGED = 0.02


class Source:
    """The weights of a trainer, without one."""

    def __init__(self, model: Decoder) -> None:
        self.weights: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}

    def weight_buckets(self, packer: Packer) -> Iterator[Bucket]:
        return packer.pack(self.weights.items())

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        raise AssertionError("nothing is probed")

    @torch.no_grad()
    def update(self, seed: int) -> None:
        """Move a share of the numbers by one unit in the last place, here and there."""
        for number, tensor in enumerate(self.weights.values()):
            generator = torch.Generator(tensor.device).manual_seed(1000 * seed + number)
            bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
            moved = torch.rand(tensor.shape, generator=generator, device=tensor.device) < CHANGED
            bits.add_(moved.to(bits.dtype))


def remote_engine(folder: Path, *, device: torch.device, dtype: torch.dtype) -> RemoteEngine:
    kwargs = {
        "model": ModelConfig(path=str(folder)),
        "engine": NativeEngineConfig(own_process=True, max_concurrency=4, memory_share=0.1),
        "device": device,
        "dtype": dtype,
        "threads": 1,
        "seed": 0,
        "max_tokens": MAX_TOKENS,
        "chunk_bytes": TrainerConfig().logits_bytes(device.type),
    }
    spec = GroupSpec(
        factory=SERVER,
        kwargs={"factory": ENGINES["native"].factory, "kwargs": kwargs},
        kind="engine",
        name="engine",
        log_file=folder / "engine.log",
        start_timeout_s=300,
    )
    return RemoteEngine(
        lambda: open_group(InProcessCluster(), spec),
        vocabulary=1,
        can_decode=True,
        timeout_s=300,
        update_timeout_s=300,
    )


def engine_here(model: Decoder, *, device: torch.device) -> NativeEngine:
    return NativeEngine(
        model,
        NativeEngineConfig(max_concurrency=4, memory_share=0.1),
        device=device,
        max_tokens=MAX_TOKENS,
        decode=None,
        chunk_bytes=TrainerConfig().logits_bytes(device.type),
    )


def measure(
    kind: str, source: Source, engine: Engine, *, folder: Path, device: torch.device, rounds: int
) -> dict[str, Any]:
    config = TypeAdapter(AnyTransport).validate_python({"type": kind})
    transport = open_transport(
        config, folder=folder, device=device, timeout_s=300, own=source.weights
    )
    seconds, sent = [], []
    with closing(Publisher(transport, probe=None)) as publisher:
        if not engine.capabilities.shares_weights:
            engine.connect(transport)
        for number in range(rounds + 1):
            source.update(number)
            version = engine.policy_version + 1
            manifest = publisher.publish(
                source, engine, version=version, quiesce=Quiesce.DRAIN, on_ended=list
            )
            seconds.append(manifest.seconds)
            sent.append(getattr(manifest, "sent_bytes", manifest.num_bytes))
    # The first one meets, allocates and compiles.
    found = {
        "seconds": round(statistics.median(seconds[1:]), 4),
        "slowest_s": round(max(seconds[1:]), 4),
        "first_s": round(seconds[0], 4),
        "bytes": statistics.median(sent[1:]),
    }
    print(kind, json.dumps(found), flush=True)
    return found


def run(
    *, device: torch.device, shape: str, dtype: torch.dtype, kinds: Sequence[str], rounds: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(
            SHAPES[shape], folder / "model", device=device, dtype=dtype, num_prompts=1,
            prompt_tokens=8,
        )  # fmt: skip
        model = random_decoder(SHAPES[shape], device=device, dtype=dtype)
        source = Source(model)
        place = {"folder": folder, "device": device, "rounds": rounds}
        with closing(engine_here(model, device=device)) as own:
            found["in_process"] = measure("in_process", source, own, **place)
        with closing(remote_engine(folder / "model", device=device, dtype=dtype)) as remote:
            for kind in kinds:
                found[kind] = measure(kind, source, remote, **place)
        found["model_bytes"] = sum(tensor.nbytes for tensor in source.weights.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    common.add_commit(parser)
    options = parser.parse_args()
    kinds = options.kinds or KINDS[options.device][1:]
    shape = "tiny" if options.tiny else "0.5b"
    found = run(
        device=torch.device(options.device),
        shape=shape,
        dtype=torch.bfloat16,
        kinds=[kind for kind in kinds if kind != "in_process"],
        rounds=2 if options.tiny else options.rounds,
    )
    result = common.facts_of(options, ("torch", "homeostat"))
    result |= common.device_facts(options.device) | {"shape": shape, "transports": found}
    common.write_result(f"publish_{options.device}", result)


if __name__ == "__main__":
    main()
