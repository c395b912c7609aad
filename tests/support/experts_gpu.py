"""Two ranks on one GPU share the experts of a layer, by gloo, beside a local trainer on that GPU.

NCCL refuses two ranks on one GPU, so that messages go through host memory here. Run as a module:
rank, folder, precision. The first rank writes what it found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed as dist

from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.config.load import build_config
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.fsdp.make import make_trainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch
from homeostat.workers.context import WorkerContext

POLICY, SIZE, STEPS = Role.POLICY, 2, 3


def recipe(folder: Path, precision: str, *, is_local: bool) -> RunConfig:
    backend = {"type": "fsdp", "expert_parallel_size": SIZE}
    trainer = {
        "precision": precision,
        "device": "cuda",
        "max_steps": STEPS,
        "max_grad_norm": None,
        "optimizer": {"type": "adamw", "eps": 1e-2},
    }
    raw = {
        "name": "run",
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"train": [{"type": "messages", "path": "rows.jsonl"}]},
        "trainer": trainer if is_local else {**trainer, "backend": backend},
    }
    if not is_local:
        raw["cluster"] = {"type": "torchrun", "processes": SIZE, "timeout_s": 60}
    return build_config(raw, [], file=None)


def batches() -> tuple[list[TokenRow], list[TrainBatch]]:
    rng = np.random.default_rng(0)
    rows = [
        TokenRow(number, rng.integers(0, 299, length), np.ones(length, dtype=np.float32))
        for number, length in enumerate((60, 67, 31, 81))
    ]
    return rows, [TrainBatch.of(rows[:2]), TrainBatch.of(rows[2:])]


def main(rank: int, folder: Path, precision: str) -> None:
    meeting = f"file://{folder / f'meeting_{precision}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SIZE)
    torch.cuda.init()
    context = WorkerContext(rank, SIZE, 0, "trainer", LOOPBACK)
    config = recipe(folder, precision, is_local=False)
    with patch("torch.cuda.device_count", return_value=SIZE):
        trainer = make_trainer(context, config=config.for_trainer, threads=1)
    alone = recipe(folder, precision, is_local=True)
    whole = local_trainer(alone.for_trainer, resolve_runtime(alone, kept=PLAIN))
    rows, dealt = batches()
    spec, found = loss_spec(SftConfig(), rows), []
    for step in range(1, STEPS + 1):
        trainer.accumulate(POLICY, [dealt[rank]], spec, step=step)
        ours = trainer.apply(POLICY, step=step, learning_rate=1e-2)
        whole.accumulate(POLICY, dealt, spec, step=step)
        theirs = whole.apply(POLICY, step=step, learning_rate=1e-2)
        assert ours.load is not None
        assert theirs.load is not None
        moved = float(np.abs(ours.load.load_LE - theirs.load.load_LE).sum())
        norms = [ours.grad_norm, theirs.grad_norm]
        found.append({"loss": [ours.loss, theirs.loss], "grad_norm": norms, "moved": moved})
    names = [name for name, _ in trainer.weights(POLICY)]
    assert names == [name for name, _ in whole.weights(POLICY)]
    if rank == 0:
        (folder / f"result_{precision}.json").write_text(json.dumps(found))
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
