"""Two ranks on one GPU share a row, by gloo, beside a local trainer on the same GPU.

NCCL refuses two ranks on one GPU, so that messages go through host memory here. Run as a module:
rank, size, folder, cp, sp, precision. The first rank writes what it found.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed as dist

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.config.load import build_config
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.fsdp.make import make_trainer
from homeostat.train.fsdp.trainer import FsdpTrainer
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch
from homeostat.workers.context import WorkerContext

LENGTHS = (1500, 700, 700)


def recipe(folder: Path, size: int, *, cp: int, sp: int, precision: str) -> dict[str, Any]:
    backend = {"type": "fsdp", "context_parallel_size": cp, "sequence_parallel_size": sp}
    return {
        "name": "run",
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"train": [{"type": "messages", "path": "rows.jsonl"}]},
        "trainer": {"backend": backend, "precision": precision, "max_steps": 1},
        "cluster": {"type": "torchrun", "processes": size, "timeout_s": 60},
    }


def rows() -> list[TokenRow]:
    rng = np.random.default_rng(0)
    return [
        TokenRow(number, rng.integers(0, 97, length), np.ones(length, dtype=np.float32))
        for number, length in enumerate(LENGTHS)
    ]


def gradients(trainer: FsdpTrainer | LocalTrainer) -> dict[str, torch.Tensor]:
    training = trainer.roles[Role.POLICY].training
    assert training is not None
    if isinstance(trainer, LocalTrainer):
        return training.optimizer.gradients.present()
    return {name: param.grad.full_tensor() for name, param in training.params.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(rank: int, size: int, folder: Path, cp: int, sp: int, precision: str) -> None:
    meeting = f"file://{folder / f'meeting_{cp}_{sp}_{precision}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    raw = recipe(folder, size, cp=cp, sp=sp, precision=precision)
    config = build_config(raw, [], file=None)
    context = WorkerContext(rank, size, 0, "trainer", LOOPBACK)
    batch, spec = TrainBatch.of(rows()), loss_spec(SftConfig(), rows())
    if torch.cuda.is_available():
        torch.cuda.init()
    with patch("torch.cuda.device_count", return_value=size):
        ranks = make_trainer(context, config=config.for_trainer, threads=1)
        runtime = resolve_runtime(config, kept=PLAIN)
    ranks.accumulate(Role.POLICY, [batch], spec, step=1)
    _synchronize()
    started = time.perf_counter()
    ranks.discard(Role.POLICY)
    ranks.accumulate(Role.POLICY, [batch], spec, step=1)
    _synchronize()
    seconds = time.perf_counter() - started
    found, share = gradients(ranks), ranks.pending(Role.POLICY)
    whole = local_trainer(config.for_trainer, runtime)
    whole.accumulate(Role.POLICY, [batch], spec, step=1)
    wanted, expected = gradients(whole), whole.pending(Role.POLICY)
    errors = [float((found[n] - g).norm() / (g.norm() + 1e-12)) for n, g in wanted.items()]
    if rank == 0:
        result = {
            "cp": cp,
            "sp": sp,
            "precision": precision,
            "loss": share.loss,
            "local_loss": expected.loss,
            "gradient_error": max(errors),
            "seconds": seconds,
        }
        (folder / f"result_{cp}_{sp}_{precision}.json").write_text(json.dumps(result))
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, size, folder, cp, sp, precision = sys.argv[1:]
    main(int(rank), int(size), Path(folder), int(cp), int(sp), precision)
