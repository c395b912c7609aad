"""Memory and time of an update with each optimizer: estimated and measured, side by side.

    python bench/optimizers.py --device cuda [--shape 1.5B]
    python bench/optimizers.py --device cpu [--shape 31M]

Each setting is a model of random weights that makes a few real updates of two micro-batches in a
separate process. On a GPU the measured peak is what torch allocated, on a CPU what the process
had resident, so `--inline` (all settings in one process) is for a GPU alone. `step_ms` is the
optimizer's step alone (median), `update_ms` the whole update with both passes; `offload` settings
keep state and masters in host memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch
from estimate import SHAPES

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.loading.load import build_config
from homeostat.config.run import RunConfig
from homeostat.observe.devices import host_rss
from homeostat.run.sizing.estimate import full_batch, loss_of
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TrainBatch

PACKAGES = ("torch", "triton")
OFFLOAD = "trainer.backend.offload_optimizer=true"
SETTINGS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adamw, moments bf16": ("trainer.optimizer.moments=bf16",),
    "adamw, moments 8bit": ("trainer.optimizer.moments=8bit",),
    "muon": ("trainer.optimizer.type=muon",),
    "muon, moments 8bit": ("trainer.optimizer={type: muon, moments: 8bit}",),
    "adafactor": ("trainer.optimizer.type=adafactor",),
}
# Weights in bf16, and a device apart from the host, are a GPU's.
GPU_SETTINGS = {
    "adamw, moments 8bit, masters bf16": ("trainer.optimizer={moments: 8bit, masters: bf16}",),
    "adafactor, masters bf16": ("trainer.optimizer={type: adafactor, masters: bf16}",),
    "adamw, offload": (OFFLOAD,),
    "adamw, moments 8bit, offload": ("trainer.optimizer.moments=8bit", OFFLOAD),
    "muon, offload": ("trainer.optimizer.type=muon", OFFLOAD),
    "adamw, offload, layers too": (OFFLOAD, "trainer.backend.offload_params=true"),
}
# Later steps, of which the trainer measures nothing by passes over all weights.
STEPS = {"cpu": range(4, 7), "cuda": range(4, 10)}


def config_of(folder: Path, device: str, overrides: tuple[str, ...]) -> RunConfig:
    raw = {
        "name": "optimizers",
        "runs_dir": str(folder),
        "model": {"path": str(folder), "init": "random"},
        "data": {"train": [{"type": "messages", "path": "none.jsonl"}], "max_length": 512},
        "trainer": {"device": device, "max_steps": 9, "gradient_checkpointing": True},
    }
    return build_config(raw, list(overrides), file=None)


def updates(trainer: LocalTrainer, batch: TrainBatch) -> dict[str, float]:
    """Make updates; return medians of the step alone and of all of it, in ms."""
    training = trainer.roles[Role.POLICY].training
    assert training is not None, "the policy is trained"
    spec = loss_spec(SftConfig(), batch.rows() * 2)
    step, steps, wholes = training.optimizer.step, [], []

    def timed(**how: Any) -> None:
        started = _now()
        step(**how)
        steps.append(_now() - started)

    training.optimizer.step = timed
    for number in STEPS[trainer.runtime.device.type]:
        started = _now()
        trainer.accumulate(Role.POLICY, [batch, batch], spec, step=number)
        trainer.apply(Role.POLICY, step=number, learning_rate=1e-5)
        wholes.append(_now() - started)
    kept = slice(1, None)
    found = {
        "step_ms": statistics.median(steps[kept]),
        "update_ms": statistics.median(wholes[kept]),
    }
    return {name: round(1e3 * seconds, 2) for name, seconds in found.items()}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, *, shape: str, device: str, tokens: int) -> dict[str, Any]:
    """Return the row of one setting, in this process."""
    overrides = {**SETTINGS, **GPU_SETTINGS}[name]
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "config.json").write_text(json.dumps({**_LLAMA, **SHAPES[shape]}))
        config = config_of(folder, device, overrides)
        runtime = resolve_runtime(config, kept=PLAIN)
        batch = full_batch(config, tokens)
        plan = estimate_update(config.for_trainer, runtime, batch, loss_of(config, batch))
        before = int(host_rss()) if device == "cpu" else 0
        trainer = local_trainer(config.for_trainer, runtime)
    times = updates(trainer, batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak
    return {
        "setting": name,
        "estimated_bytes": before + plan.peak,
        "measured_bytes": peak,
        "off": round((before + plan.peak) / peak - 1, 4),
        "optimizer_bytes": plan.optimizer,
        "host_bytes": plan.host,
        **times,
    }


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "rope_theta": 1e4,
    "hidden_act": "silu",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="Tokens of a micro-batch.")
    parser.add_argument("--only", default="", help="Part of a setting's name.")
    parser.add_argument("--inline", action="store_true", help="In one process, on a GPU.")
    parser.add_argument("--one", default=None, help="Measure this setting in this process.")
    parser.add_argument("--commit", default=None, help="Where there is no git to ask.")
    chosen = parser.parse_args()
    is_gpu = chosen.device == "cuda"
    shape = chosen.shape or ("1.5B" if is_gpu else "31M")
    tokens = chosen.tokens or (8192 if is_gpu else 2048)
    if chosen.one is not None:
        print(json.dumps(measure(chosen.one, shape=shape, device=chosen.device, tokens=tokens)))
        return
    names = [n for n in {**SETTINGS, **(GPU_SETTINGS if is_gpu else {})} if chosen.only in n]
    how = ["--device", chosen.device, "--shape", shape, "--tokens", str(tokens)]
    rows = []
    for name in names:
        if chosen.inline:
            rows.append(measure(name, shape=shape, device=chosen.device, tokens=tokens))
            print(json.dumps(rows[-1]), flush=True)
            continue
        command = [sys.executable, __file__, *how, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    result = {**common.machine(PACKAGES), "shape": shape, "tokens": tokens, "rows": rows}
    if chosen.commit:
        result["commit"] = chosen.commit
    common.write_result(f"optimizers_{chosen.device}", result)


if __name__ == "__main__":
    main()
