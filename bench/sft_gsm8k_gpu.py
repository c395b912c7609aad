"""SmolLM2-135M-Instruct fine-tuned on GSM8K on one GPU: does it learn, how fast, in what memory?

    python bench/sft_gsm8k_gpu.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data gsm8k/

Runs recipes/smollm2_gsm8k_gpu.yaml through the command line, as a user would, and reads the run
directory. The last line printed is the JSON, also written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smollm2_gsm8k_gpu.yaml"
# The first steps warm up kernels and the allocator.
NUM_WARMUP_STEPS = 5


def train(arguments: argparse.Namespace, runs_dir: str) -> None:
    overrides = [
        f"model.path={arguments.model}",
        f"data.train.0.path={arguments.data}/train.jsonl",
        f"data.validation.0.path={arguments.data}/test.jsonl",
        f"runs_dir={runs_dir}",
        "observe.console=plain",
        *arguments.overrides,
    ]
    code = "from homeostat.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", str(RECIPE), *overrides]
    subprocess.run(command, check=True)


def summarise(run_dir: Path) -> dict[str, object]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    steady = [r for r in records if r["step"] > NUM_WARMUP_STEPS]
    evals = {r["step"]: r["eval/loss"] for r in records if "eval/loss" in r}
    step_s = [r["time/step"] for r in steady]
    return {
        "steps": records[-1]["step"],
        "tokens": records[-1]["num_tokens"],
        "eval_loss_start": evals[0],
        "eval_loss_best": min(evals.values()),
        "eval_loss_end": evals[records[-1]["step"]],
        "train_loss_first": records[1]["train/loss"],
        "train_loss_last_10": statistics.mean(r["train/loss"] for r in records[-10:]),
        "tokens_per_s_median": statistics.median(r["throughput/tokens_per_s"] for r in steady),
        "step_s_median": statistics.median(step_s),
        "data_wait_share": sum(r["time/data_wait"] for r in steady) / sum(step_s),
        "max_alloc_gib": max(r["memory/max_alloc"] for r in steady) / 2**30,
        "max_reserved_gib": max(r["memory/max_reserved"] for r in steady) / 2**30,
        "wall_s": events[-1]["time"] - events[0]["time"],
        "model_loaded": next(e for e in events if e["kind"] == "model_loaded"),
    }


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the .gguf file or an HF folder")
    parser.add_argument("--data", required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    parser.add_argument("overrides", nargs="*", help="keys of the recipe to change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs_dir:
        train(arguments, runs_dir)
        result = summarise(Path(runs_dir) / "smollm2_gsm8k_gpu")
    machine = common.machine(("torch", "transformers", "triton", "numpy"))
    if arguments.commit:
        machine["commit"] = arguments.commit
    common.write_result("sft_gsm8k_gpu", {**machine, "gpu": gpu_name(), **result})


if __name__ == "__main__":
    main()
