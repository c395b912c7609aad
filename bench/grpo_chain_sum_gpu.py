"""SmolLM2-135M learns two-term sums on one GPU: pass@1 before, after SFT, after GRPO.

    python bench/grpo_chain_sum_gpu.py --model SmolLM2-135M-Instruct.Q4_1.gguf

Runs the two recipes smollm2_chain_sum_{sft,grpo}_gpu.yaml through the command line, as a user
would, and reads the run directories. The model as it came is measured by the GRPO recipe's own
evaluation, before a step of learning rate 0. Held-out questions are in none of the training files.
The last line printed is the JSON, also written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SFT, GRPO = "smollm2_chain_sum_sft_gpu", "smollm2_chain_sum_grpo_gpu"
# The first steps warm up kernels and the allocator.
NUM_WARMUP_STEPS = 3


def train(recipe: str, *overrides: str) -> None:
    code = "from homeostat.cli.main import main; main()"
    file = RECIPES / f"{recipe}.yaml"
    command = [sys.executable, "-c", code, "train", str(file), "observe.console=plain", *overrides]
    subprocess.run(command, check=True, cwd=RECIPES.parent)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def passes(records: list[dict[str, Any]], which: int) -> dict[str, float]:
    found = [record for record in records if "eval/pass@1" in record][which]
    return {name: value for name, value in found.items() if name.startswith("eval/")}


def summarise(run_dir: Path) -> dict[str, Any]:
    records = read(run_dir / "metrics.jsonl")
    events = read(run_dir / "events.jsonl")
    steady = [record for record in records if record["step"] > NUM_WARMUP_STEPS]

    def median(name: str) -> float:
        return round(statistics.median(record[name] for record in steady), 4)

    def largest(name: str) -> float:
        return max(record[name] for record in steady)

    stages = ("step", "generate", "reward", "score", "train")
    return {
        "steps": records[-1]["step"],
        "reward_first_5": statistics.mean(record["reward"] for record in records[1:6]),
        "reward_last_5": statistics.mean(record["reward"] for record in records[-5:]),
        "pass_at_1": {r["step"]: r["eval/pass@1"] for r in records if "eval/pass@1" in r},
        "seconds_median": {stage: median(f"time/{stage}") for stage in stages},
        "engine_tokens_per_s_median": median("engine/tokens_per_s"),
        "logp_difference_mean": statistics.mean(
            r["sampling/sampling_logp_difference/mean"] for r in steady
        ),
        "logp_difference_max": largest("sampling/sampling_logp_difference/max"),
        "max_alloc_gib": round(largest("memory/max_alloc") / 2**30, 2),
        "max_reserved_gib": round(largest("memory/max_reserved") / 2**30, 2),
        "wall_s": round(events[-1]["time"] - events[0]["time"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the .gguf file or an HF folder")
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    parser.add_argument("--runs-dir", help="keep the run directories here")
    parser.add_argument("overrides", nargs="*", help="keys of the GRPO recipe to change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(arguments.runs_dir or temporary).resolve()
        runs = f"runs_dir={place}"
        one_step = ("trainer.max_steps=1", "trainer.lr=0", "trainer.schedule={type: constant}")
        train(GRPO, runs, "name=before", f"model.path={arguments.model}", *one_step)
        train(SFT, runs, f"model.path={arguments.model}")
        checkpoint = sorted((place / SFT / "checkpoints").glob("step_*"))[-1]
        train(GRPO, runs, f"model.path={checkpoint / 'hf'}", *arguments.overrides)
        learned = read(place / GRPO / "metrics.jsonl")
        result = {
            "before": passes(read(place / "before" / "metrics.jsonl"), 0),
            "after_sft": passes(learned, 0),
            "after_rl": passes(learned, -1),
            "grpo": summarise(place / GRPO),
        }
    machine = common.machine(("torch", "transformers", "triton", "numpy"))
    if arguments.commit:
        machine["commit"] = arguments.commit
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    common.write_result("grpo_chain_sum_gpu", {**machine, "gpu": gpu, **result})


if __name__ == "__main__":
    main()
