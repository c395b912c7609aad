"""Claim: ranks that share a long row each need a fraction of its memory, and the same total work.

    python bench/long_rows.py [--tokens 4096]

One update of one long row, forward and backward, of a small random model in fp32: by a single rank,
and by 2 and 4 ranks that share it (Ulysses, ring, both). For each case:

    peak_mb      how far the resident memory of a rank rose above what it was before the update: its
                 activations, and what it exchanges; the largest of all ranks
    cpu_s        CPU seconds of the update, summed over ranks: one device's work, and what sharing
                 adds (copies, messages, merging)
    loss         the same in all cases

Ranks are forked processes on this machine and talk by gloo. Wall time says little here, because
ranks may be more than cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from torch import distributed as dist

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.config.loading.load import build_config
from homeostat.train.fsdp.make import make_trainer
from homeostat.types import Role, TokenRow, TrainBatch
from homeostat.workers.context import WorkerContext

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets"
# (ranks, context_parallel_size, sequence_parallel_size)
CASES = ((1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 1, 4), (4, 2, 2))
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65536,
}
VOCABULARY = 299
DEADLINE_S = 600.0
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """One case of the table."""

    ranks: int
    context_parallel_size: int
    sequence_parallel_size: int
    peak_mb: float
    cpu_s: float
    wall_s: float
    loss: float


def write_model(folder: Path) -> Path:
    target = folder / "model"
    target.mkdir()
    for file in (ASSETS / "tiny-chat").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **MODEL}))
    return target


def recipe(model: Path, ranks: int, cp: int, sp: int) -> dict[str, Any]:
    backend = {"type": "fsdp", "context_parallel_size": cp, "sequence_parallel_size": sp}
    return {
        "name": "long",
        "model": {"path": str(model), "init": "random"},
        "data": {"train": [{"type": "messages", "path": "rows.jsonl"}]},
        "trainer": {"backend": backend, "device": "cpu", "precision": "fp32", "threads": 1},
        "cluster": {"type": "torchrun", "processes": ranks, "timeout_s": DEADLINE_S},
    }


def row(tokens: int) -> TokenRow:
    rng = np.random.default_rng(0)
    return TokenRow(0, rng.integers(0, VOCABULARY, tokens), np.ones(tokens, dtype=np.float32))


def resident_mb(field: str) -> float:
    """VmRSS is the resident memory, VmHWM its peak since that was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_rank(rank: int, case: tuple[int, int, int], folder: Path, tokens: int) -> None:
    """One rank: a short update first, so that all that stays is there, then the long one."""
    torch.set_num_threads(1)
    ranks, cp, sp = case
    config = build_config(recipe(folder / "model", *case), [], file=None)
    context = WorkerContext(rank, ranks, rank, "trainer", LOOPBACK)
    meeting = f"file://{folder}/meeting_{ranks}_{cp}_{sp}"
    trainer = make_trainer(context, config=config.for_trainer, threads=1, rendezvous=meeting)
    for length in (64, tokens):
        batch, spec = TrainBatch.of([row(length)]), loss_spec(SftConfig(), [row(length)])
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before, cpu, wall = resident_mb("VmRSS"), time.process_time(), time.perf_counter()
        trainer.accumulate(Role.POLICY, [batch], spec, step=1)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        peak = resident_mb("VmHWM") - before
        loss = trainer.pending(Role.POLICY).loss
        trainer.discard(Role.POLICY)
    found = {"peak_mb": peak, "cpu_s": cpu, "wall_s": wall, "loss": loss}
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    trainer.close()


def measure(case: tuple[int, int, int], folder: Path, tokens: int) -> Row:
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=run_rank, args=(rank, case, folder, tokens)) for rank in range(case[0])
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE_S)
    finally:
        for process in processes:
            process.kill()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RuntimeError(f"{case}: ranks ended with {codes}")
    found = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(case[0])]
    return Row(
        *case,
        peak_mb=round(max(one["peak_mb"] for one in found), 1),
        cpu_s=round(sum(one["cpu_s"] for one in found), 2),
        wall_s=round(max(one["wall_s"] for one in found), 2),
        loss=found[0]["loss"],
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args(argv).tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        rows = []
        for case in CASES:
            rows.append(measure(case, folder, tokens))
            print(json.dumps(asdict(rows[-1])), flush=True)
    worst = max(abs(row.loss - rows[0].loss) / abs(rows[0].loss) for row in rows)
    result = {
        **common.machine(("torch", "numpy")),
        "tokens": tokens,
        "rows": [asdict(row) for row in rows],
        "loss_difference": worst,
    }
    common.write_result("long_rows", result)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
