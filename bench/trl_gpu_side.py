"""TRL's side of grpo_step_gpu: GRPOTrainer on the same model folder, in a separate process.

Settings are trl_grpo_side's, in bf16 on a GPU: weights, activations and optimizer state, which is
less memory and less work than the fp32 masters that homeostat keeps. Run with one JSON argument
{"workload": {...}, "rows": micro-batch, "device": "cuda" | "cpu", "out": file}; each step appends a
line to the file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from shapes import DTYPES
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_grpo_side import Workload, base_settings, digit_share


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that knows how long its last generation took."""

    generate_s = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        found = super()._generate(prompts)
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self.generate_s = time.perf_counter() - started
        return found


class Lines(TrainerCallback):
    """One line per step, as homeostat's metrics.jsonl has, with its names."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.trainer: TimedTrainer | None = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs:
            return
        assert self.trainer is not None
        line = {
            "step": state.global_step,
            "time/generate": self.trainer.generate_s,
            "train/loss": logs["loss"],
            "reward": logs["reward"],
            "grad_norm": logs["grad_norm"],
            "completions/mean_length": logs["completions/mean_length"],
            **_memory(self.trainer.accelerator.device),
        }
        with open(self.out, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def _memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "memory/max_alloc": torch.cuda.max_memory_allocated(),
        "memory/max_reserved": torch.cuda.max_memory_reserved(),
    }


def make_trainer(workload: Workload, out: Path, *, rows: int, device: str) -> TimedTrainer:
    torch.set_num_threads(workload.threads)
    on_gpu = {"bf16": True, "use_cpu": False} if device == "cuda" else {}
    settings = base_settings(workload, rows=rows) | on_gpu
    text = (Path(workload.folder) / "prompts.jsonl").read_text(encoding="utf-8")
    lines = Lines(out)
    lines.trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            workload.folder, dtype=DTYPES[device], attn_implementation="sdpa"
        ),
        args=GRPOConfig(output_dir=str(out.parent / "trl"), **settings),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        reward_funcs=digit_share,
        train_dataset=Dataset.from_list([json.loads(line) for line in text.splitlines()]),
        callbacks=[lines],
    )
    return lines.trainer


def main() -> None:
    task = json.loads(sys.argv[1])
    workload, out = Workload(**task["workload"]), Path(task["out"])
    make_trainer(workload, out, rows=task["rows"], device=task["device"]).train()


if __name__ == "__main__":
    main()
