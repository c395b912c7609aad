"""Claim: the demo learns, whatever the seed, in minutes on a CPU.

    python bench/demo_seeds.py --seeds 10 11 12

Runs the two recipes of `make demo` through the command line for each seed, one after the other, and
reads the run directories: rewards of every step, held-out pass@1, wall time with start-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
SFT, GRPO = "tiny_sort_sft_cpu", "tiny_sort_grpo_cpu"
NUM_LAST = 5


def train(recipe: str, *overrides: str) -> float:
    """Wall seconds of the whole command."""
    code = "from homeostat.cli.main import main; main()"
    file = ROOT / "recipes" / f"{recipe}.yaml"
    line = [sys.executable, "-c", code, "train", str(file), "observe.console=plain", *overrides]
    started = time.perf_counter()
    subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def run_seed(seed: int, place: Path) -> dict[str, Any]:
    runs = (f"runs_dir={place}", f"seed={seed}")
    sft_s = train(SFT, *runs)
    weights = sorted((place / SFT / "checkpoints").glob("step_*"))[-1] / "hf"
    grpo_s = train(GRPO, *runs, f"model.path={weights}")
    lines = (place / GRPO / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rewards = [record["reward"] for record in records if "reward" in record]
    held_out = {r["step"]: r["eval/pass@1"] for r in records if "eval/pass@1" in r}
    return {
        "seed": seed,
        "sft_s": round(sft_s, 1),
        "grpo_s": round(grpo_s, 1),
        "wall_s": round(sft_s + grpo_s, 1),
        "reward_first": rewards[0],
        "reward_last": statistics.mean(rewards[-NUM_LAST:]),
        "held_out_pass_at_1": held_out,
        "rewards": [round(reward, 4) for reward in rewards],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="homeostat-demo-") as place:
            found.append(run_seed(seed, Path(place)))
        last = found[-1]
        print(
            f"seed {seed}: reward {last['reward_first']:.3f} -> {last['reward_last']:.3f} in "
            f"{last['wall_s']:.0f} s",
            flush=True,
        )
    machine = common.machine(("torch", "transformers", "numpy"))
    common.write_result("demo_seeds", {**machine, "seeds": found})


if __name__ == "__main__":
    main()
