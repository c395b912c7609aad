"""Claim: a rank that offloads its weights and Adam's state trains as well, in less device memory.

    python bench/rank_offload.py [--device cuda|cpu] [--layers N]

One rank (FSDP2; NCCL on a GPU) makes a few updates of a random model of about 0.5 B parameters in
bf16 in one process: all on the device, the same once more, with Adam's state in host memory
(offload_optimizer), and with the weights and gradients there, too (offload_params). Losses may
differ from the first run's by TOLERANCE; how far the repeated run differs says what of it is the
GPU's own. Peak memory of the device and seconds per update are listed, beside the estimate.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.config.loading.load import build_config
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.fsdp.make import make_trainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch
from homeostat.workers.context import WorkerContext

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets"
POLICY = Role.POLICY
CHOICES: dict[str, dict[str, bool]] = {
    "on the device": {},
    "once more": {},
    "offload_optimizer": {"offload_optimizer": True},
    "offload_params": {"offload_optimizer": True, "offload_params": True},
}
LENGTHS = (900, 500, 400, 240)
UPDATES = 4
# Relative, of losses in bf16 over these updates.
TOLERANCE = 1e-3


def config_of(folder: Path, backend: dict[str, bool], *, device: str, layers: int) -> RunConfig:
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        for file in (ASSETS / "tiny-chat").iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        sizes: dict[str, Any] = {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
        }  # fmt: skip
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **sizes}))
    trainer = {
        "backend": {"type": "fsdp", **backend},
        "precision": "bf16",
        "device": device,
        "max_steps": UPDATES,
        "threads": 1,
    }
    raw = {
        "name": "offload",
        "model": {"path": str(model), "init": "random"},
        "data": {"train": [{"type": "messages", "path": "rows.jsonl"}], "max_length": 1024},
        "trainer": trainer,
        "cluster": {"type": "torchrun", "processes": 1},
    }
    return build_config(raw, [], file=None)


def rows() -> list[TokenRow]:
    rng = np.random.default_rng(0)
    return [
        TokenRow(number, rng.integers(0, 299, length), np.ones(length, dtype=np.float32))
        for number, length in enumerate(LENGTHS)
    ]


def measure(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Make some updates; return losses, seconds and peak bytes of the device."""
    context = WorkerContext(0, 1, 0, "trainer", LOOPBACK)
    meeting = f"file://{folder / 'meeting'}"
    is_gpu = config.trainer.device == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(context, config=config.for_trainer, threads=1, rendezvous=meeting)
    data, losses, seconds = rows(), [], []
    batch, spec = TrainBatch.of(data), loss_spec(SftConfig(), data)
    for step in range(1, UPDATES + 1):
        started = time.perf_counter()
        # Two micro-batches: gradients are added up where they are kept.
        trainer.accumulate(POLICY, [batch, batch], spec, step=step)
        losses.append(trainer.apply(POLICY, step=step, learning_rate=1e-4).loss)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    plan = estimate_update(config.for_trainer, resolve_runtime(config, kept=PLAIN), batch, spec)
    return {
        "losses": losses,
        "seconds_per_update": min(seconds[1:]),
        "peak_bytes": peak,
        "estimated_bytes": plan.peak,
        "host_bytes": plan.host,
        "num_params": trainer.sheet.num_params,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--layers", type=int, default=30)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="homeostat-offload-") as place:
        folder = Path(place)
        for name, backend in CHOICES.items():
            how = {"device": arguments.device, "layers": arguments.layers}
            found[name] = measure(config_of(folder, backend, **how), folder)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            shown = {key: value for key, value in found[name].items() if key != "losses"}
            print(f"{name:18s} {json.dumps(shown)}", flush=True)
    torch.distributed.destroy_process_group()
    first = np.array(found["on the device"]["losses"])
    for one in found.values():
        one["loss_difference"] = float((np.abs(np.array(one["losses"]) - first) / first).max())
    largest = max(one["loss_difference"] for one in found.values())
    result = {**common.machine(("torch",)), "updates": UPDATES, "tolerance": TOLERANCE, **found}
    common.write_result(f"rank_offload_{arguments.device}", result)
    if largest > TOLERANCE:
        sys.exit(f"losses differ by {largest:.1e}")


if __name__ == "__main__":
    main()
