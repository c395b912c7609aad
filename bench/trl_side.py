"""TRL's side of sft_vs_trl: SFTTrainer on the same rows, in a separate process.

`VARIANTS` holds the settings that were tried to make it fast. Each update appends one line to a
file, as homeostat's metrics.jsonl does. Run by sft_vs_trl.py with one JSON argument.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-4
MAX_LENGTH = 1024

# What each variant of TRL changes. `rows` is per_device_train_batch_size; accumulation makes up
# the rest of an update. `attention` is transformers' attn_implementation. Rebalancing and packing
# put other rows into an update, so their losses differ: they are measured, but cannot be BEST.
VARIANTS: dict[str, dict[str, Any]] = {
    "rows1": {"rows": 1},
    "rows1_eager": {"rows": 1, "attention": "eager"},
    "rows1_worker": {"rows": 1, "dataloader_num_workers": 1},
    "rows1_compile": {"rows": 1, "torch_compile": True},
    "rows2": {"rows": 2},
    "rows2_rebalance": {"rows": 2, "train_sampling_strategy": "batch_rebalance"},
    "rows4": {"rows": 4},
    "rows4_rebalance": {"rows": 4, "train_sampling_strategy": "batch_rebalance"},
    "rows16": {"rows": 16},
    "padding_free2": {"rows": 2, "padding_free": True, "max_length": None},
    "padding_free4": {"rows": 4, "padding_free": True, "max_length": None},
    "padding_free8": {"rows": 8, "padding_free": True, "max_length": None},
    "padding_free16": {"rows": 16, "padding_free": True, "max_length": None},
    "packing": {"rows": 1, "packing": True, "gradient_accumulation_steps": 3},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of both sides. `folder` holds the model, the tokenizer and rows.jsonl."""

    folder: str
    steps: int
    batch_rows: int
    threads: int


def base_settings(workload: Workload, *, rows: int) -> dict[str, Any]:
    """Return the settings that all variants share, under SFTConfig's names."""
    return {
        "max_length": MAX_LENGTH,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": workload.batch_rows // rows,
        "max_steps": workload.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }


def run_trl(workload: Workload, out: Path, *, variant: str) -> None:
    """Train as `variant` says; `out` gets a line per update."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    settings = dict(VARIANTS[variant])
    attention = settings.pop("attention", "sdpa")
    settings = base_settings(workload, rows=settings.pop("rows")) | settings
    torch.set_num_threads(workload.threads)

    class Lines(TrainerCallback):
        """One line per update, as homeostat's metrics.jsonl has."""

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            if "loss" in logs:
                line = {"train/loss": logs["loss"], "num_tokens": logs["num_tokens"]}
                with open(out, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")

    text = (Path(workload.folder) / "rows.jsonl").read_text(encoding="utf-8")
    chats = [_as_chat(json.loads(line)) for line in text.splitlines()]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            workload.folder, dtype=torch.float32, attn_implementation=attention
        ),
        args=SFTConfig(output_dir=str(out.parent / "trl"), **settings),
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        callbacks=[Lines()],
    )
    trainer.train()


def _as_chat(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    run_trl(Workload(**task["workload"]), Path(task["out"]), variant=task["variant"])
