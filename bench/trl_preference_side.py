"""TRL's side of preference_vs_trl: DPOTrainer or KTOTrainer on the same rows, in its own process.

Each update appends one line to a file, as homeostat's metrics.jsonl does. Run by
preference_vs_trl.py with one JSON argument. Imports nothing from homeostat, so that TRL may be
installed in a separate environment.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-6
BETA = 0.1
MAX_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of both sides. `folder` holds the model, the tokenizer and rows.jsonl.

    `rows` is TRL's per_device_train_batch_size; accumulation makes up the rest of an update. kto
    needs the whole update in one batch, because it estimates its baseline from that.
    """

    algorithm: str
    folder: str
    steps: int
    batch_rows: int
    rows: int


def settings(workload: Workload, out: Path) -> dict[str, Any]:
    """Return the settings under the names of DPOConfig and KTOConfig."""
    return {
        "output_dir": str(out.parent / "trl"),
        "beta": BETA,
        "max_length": MAX_LENGTH,
        "precompute_ref_log_probs": True,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": workload.rows,
        "gradient_accumulation_steps": workload.batch_rows // workload.rows,
        "max_steps": workload.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
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


def run_trl(workload: Workload, out: Path) -> None:
    """Train; `out` gets a line per update."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    name = {"dpo": "DPO", "kto": "KTO"}[workload.algorithm]
    losses: list[float] = []

    class Exact(getattr(trl, f"{name}Trainer")):
        """Keeps the loss of each micro-batch, because the log rounds."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            if "loss" in logs:
                mean = sum(losses) / len(losses)
                losses.clear()
                line = {"train/loss": mean, "num_tokens": logs["num_tokens"]}
                with open(out, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")

    text = (Path(workload.folder) / "rows.jsonl").read_text(encoding="utf-8")
    trainer = Exact(
        model=AutoModelForCausalLM.from_pretrained(
            workload.folder, dtype=torch.float32, attn_implementation="sdpa"
        ),
        args=getattr(trl, f"{name}Config")(**settings(workload, out)),
        train_dataset=Dataset.from_list([_as_chat(json.loads(line)) for line in text.splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        callbacks=[Lines()],
    )
    trainer.train()


def _as_chat(row: dict[str, Any]) -> dict[str, Any]:
    def answer(name: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": row[name]}]

    asked = [{"role": "user", "content": row["prompt"]}]
    if "label" in row:
        return {"prompt": asked, "completion": answer("completion"), "label": row["label"]}
    return {"prompt": asked, "chosen": answer("chosen"), "rejected": answer("rejected")}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    run_trl(Workload(**task["workload"]), Path(task["out"]))
